"""Writes photos.json: crops of photographs (scikit-image's cat, NASA's astronaut, a cup of coffee) as PNG, and the SHA-256 of what Pillow's
bicubic resize makes of them. Run: python make_photo_golden.py (needs pillow, scikit-image)."""
import base64, hashlib, io, json, pathlib

import skimage.data
from PIL import Image

CROPS = [("chelsea", (90, 70, 210, 150)), ("astronaut", (180, 40, 270, 150)), ("coffee", (200, 60, 344, 130))]
SIZES = [(0.9, 0.9), (0.5, 0.5), (0.31, 0.77), (1.0, 0.4), (0.11, 0.13)]


def main():
    entries = []
    for name, box in CROPS:
        photo = Image.fromarray(getattr(skimage.data, name)()).convert("RGB").crop(box)
        png = io.BytesIO()
        photo.save(png, "PNG", optimize=True)
        resized = []
        for fx, fy in SIZES:
            to = (int(photo.width * fx), int(photo.height * fy))
            resized.append({"to": to, "sha256": hashlib.sha256(photo.resize(to, Image.BICUBIC).tobytes()).hexdigest()})
        entries.append({"name": name, "png": base64.b64encode(png.getvalue()).decode(), "resized": resized})
    out = pathlib.Path(__file__).with_name("photos.json")
    out.write_text(json.dumps(entries, indent=1) + "\n")


main()
