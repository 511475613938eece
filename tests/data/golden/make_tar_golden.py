"""Writes small tar files in the formats of Python's tarfile: python make_tar_golden.py"""
import io, json, pathlib, tarfile

RECORD = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}).encode()
for name, kind in [("pax", tarfile.PAX_FORMAT), ("gnu", tarfile.GNU_FORMAT), ("ustar", tarfile.USTAR_FORMAT)]:
    with tarfile.open(pathlib.Path(__file__).with_name(name + ".tar"), "w", format=kind) as tar:
        for member in ["d" * 60 + "/" + "k" * 70 + ".json", "plain.json" if name == "ustar" else "字.json"]:
            folder = tarfile.TarInfo("folder/"); folder.type = tarfile.DIRTYPE; tar.addfile(folder)
            info = tarfile.TarInfo(member); info.size = len(RECORD); info.mtime = 1.5 if name == "pax" else 1
            tar.addfile(info, io.BytesIO(RECORD))
