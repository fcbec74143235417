"""unpacked.py STORE: what a store of `image unpack` holds, for image_plan.py.

In: a store. Out, on stdout: JSON with the names of the environments there, the bytes on disk that
they have together (each file once, as they are links to STORE/files, and the folders of each), and
the KiB on disk of each pin by Python: what is for one (.pyc, .so), what is the same for all.
"""

import csv
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote


def main(store: Path) -> None:
    names = {unquote(link.name): link.resolve() for link in (store / "names").iterdir()}
    images = {folder: name for name, folder in sorted(names.items()) if "nanoswe/env:" in name}
    pins: dict[str, dict[str, tuple[int, int]]] = {}
    for folder in images:
        for info in folder.glob("root/opt/miniconda3/envs/testbed/lib/python3.*/*/*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            pin = f"{re.sub('[-_.]+', '-', name).lower()}=={version}"
            python = info.parent.parent.name.removeprefix("python")
            pins.setdefault(python, {})[pin] = _kib(info)
    row = {"schema": "unpacked/1", "images": sorted(images.values())}
    row["bytes"], row["folders"] = _bytes(images)
    print(json.dumps({**row, "pins": pins}, indent=0, sort_keys=True))


def _kib(info: Path) -> tuple[int, int]:
    """(of files for one Python: .pyc and .so; of files that are the same for all)."""
    site, blocks = info.parent, [0, 0]
    with (info / "RECORD").open(newline="") as record:
        for path, *_ in csv.reader(record):
            file = site / path
            compiled = file.parent.glob(f"__pycache__/{file.stem}.*.pyc")
            found = (file, *(compiled if file.suffix == ".py" else ()))
            for one in found:
                if one.exists():
                    shared = not re.search(r"\.pyc$|\.so\b", one.name)
                    blocks[shared] += one.lstat().st_blocks
    return blocks[0] // 2, blocks[1] // 2


def _bytes(images: Iterable[Path]) -> tuple[int, int]:
    """Of all that is there, and of its folders."""
    files, folders = dict[int, int](), dict[int, int]()
    for image in images:
        for root, _, names in os.walk(image):
            found = os.lstat(root)
            folders[found.st_ino] = found.st_blocks
            for name in names:
                found = os.lstat(f"{root}/{name}")
                files[found.st_ino] = found.st_blocks
    of_folders = sum(folders.values()) * 512
    return sum(files.values()) * 512 + of_folders, of_folders


if __name__ == "__main__":
    main(Path(sys.argv[1]))
