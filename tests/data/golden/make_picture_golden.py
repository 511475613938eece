"""Writes pictures.json: PNG files of every kind with the RGB that Pillow makes of them, and resized pictures.
Run: python make_picture_golden.py (needs pillow)."""
import base64, io, json, pathlib, struct, zlib
from PIL import Image

WIDTH, HEIGHT = 11, 9
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def noise(i):
    """Byte i of the test pictures, also computed by the test."""
    return ((i * 2654435761 + (i >> 3) * 40503) & 0xFFFFFFFF) >> 13 & 255


def text(data):
    return base64.b64encode(data).decode()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def rows(samples, depth, xs, ys):
    for y in ys:
        bits = "".join(format(v, f"0{depth}b") for x in xs for v in samples[y][x])
        bits += "0" * (-len(bits) % 8)
        yield b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")


def png(color, depth, interlaced, extra=b""):
    top = (1 << depth) - 1
    n = CHANNELS[color]
    value = lambda x, y, c: (noise((y * WIDTH + x) * n + c) * 257 + 3 * x) & top if color != 3 else noise(y * WIDTH + x) % min(top + 1, 5)
    samples = [[[value(x, y, c) for c in range(n)] for x in range(WIDTH)] for y in range(HEIGHT)]
    data = b""
    for x0, y0, dx, dy in ADAM7 if interlaced else [(0, 0, 1, 1)]:
        xs, ys = range(x0, WIDTH, dx), range(y0, HEIGHT, dy)
        if xs and ys:
            data += b"".join(rows(samples, depth, xs, ys))
    palette = chunk(b"PLTE", bytes(noise(1000 + i) for i in range(3 * min(top + 1, 5)))) if color == 3 else b""
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, color, 0, 0, interlaced)) + palette + extra
            + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b""))


def main():
    kinds = [("grey", 0, d, b"") for d in (1, 2, 4, 8, 16)] + [("palette", 3, d, b"") for d in (1, 2, 4, 8)]
    kinds += [("rgb", 2, d, b"") for d in (8, 16)] + [("grey-alpha", 4, d, b"") for d in (8, 16)] + [("rgba", 6, d, b"") for d in (8, 16)]
    kinds += [("palette-transparent", 3, 8, chunk(b"tRNS", bytes([0, 128, 255]))), ("rgb-transparent", 2, 8, chunk(b"tRNS", bytes(6))),
              ("grey-transparent", 0, 8, chunk(b"tRNS", bytes([0, 128]))), ("rgb-gamma", 2, 8, chunk(b"gAMA", struct.pack(">I", 100000)))]
    pngs = []
    for name, color, depth, extra in kinds:
        for interlaced in (0, 1):
            data = png(color, depth, interlaced, extra)
            rgb = Image.open(io.BytesIO(data)).convert("RGB")
            pngs.append({"name": f"{name}-{depth}{'-interlaced' if interlaced else ''}", "png": text(data), "rgb": text(rgb.tobytes())})
    resized = []
    for w, h, to_w, to_h in [(37, 23, 19, 11), (8, 8, 20, 13), (64, 5, 7, 5), (5, 64, 5, 7), (100, 90, 33, 31), (200, 3, 20, 1), (40, 40, 39, 39), (3, 3, 1, 1)]:
        image = Image.frombytes("RGB", (w, h), bytes(noise(i) if (i // 48) % 3 else 255 * (i % 2) for i in range(w * h * 3)))
        resized.append({"from": [w, h], "to": [to_w, to_h], "rgb": text(image.resize((to_w, to_h), Image.BICUBIC).tobytes())})
    out = pathlib.Path(__file__).with_name("pictures.json")
    out.write_text(json.dumps({"width": WIDTH, "height": HEIGHT, "png": pngs, "resize": resized}, indent=0) + "\n")
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
