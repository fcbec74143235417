"""image_plan.py: images, unique bytes and build minutes of all of Verified and all of SWE-Gym.

In: the plans, and images.jsonl, which has what was measured here: layers by kind, seconds. Out: a
table. What is not measured is estimated from it and marked so: an environment by its pins (the mean
of those measured, and HEAVY for packages that are far from it), system packages by SYSTEM_MIB.
"""

import json
import re
from pathlib import Path

from nanoswe_harbor.images import Target, plan

MIB = 2**20
# Installed MiB of the wheels that decide, read off their releases of the years in question.
HEAVY = {
    "pyqt5": 190, "pyqt5-qt5": 190, "pyarrow": 125, "llvmlite": 120, "scipy": 110, "botocore": 90,
    "numpy": 65, "pandas": 65, "rasterio": 60, "statsmodels": 45, "mypy": 45, "scikit-learn": 40,
    "babel": 33, "selenium": 30, "matplotlib": 30, "numba": 28, "pyproj": 25, "cartopy": 22,
    "netcdf4": 20, "fonttools": 20, "lxml": 18, "sphinx": 13, "pillow": 12, "h5py": 12,
    "cryptography": 11,
}  # fmt: skip
SYSTEM_MIB = {
    "texlive": 1500, "openjdk-17-jdk": 480, "build-essential": 390, "ffmpeg": 440,
    "imagemagick": 120, "cmake": 160, "graphviz": 60, "locales": 17, "pipx": 60,
}  # fmt: skip
# MiB of the repositories with all their history, of which every checkout is made (Verified's three
# largest by the size of their fetch): an environment image has none.
MIRRORS = {"verified": 3458, "swegym": 2020}
OTHERS = {
    "verified": "official 189 GiB, best public set 30 GiB",
    "swegym": "official not published",
}


def main() -> None:
    lines = (Path(__file__).parent / "images.jsonl").read_text().splitlines()
    measured = {(row["target"], row["pins"]): row for row in map(json.loads, lines)}
    plain = [row for row in measured.values() if row["pins"]]
    light_mib = sum(_light(row) for row in plain) / sum(row["pins"] for row in plain)
    seconds = sum(row["seconds"] for row in plain) / len(plain)
    python_mib = sum(row["bytes"]["python"] for row in plain) / len(plain) / MIB
    base_mib = plain[0]["bytes"]["base"] / MIB
    print(
        "| set | images | measured | layers GiB | unpacked GiB | repositories GiB | build minutes "
        "| others |\n|---|--:|--:|--:|--:|--:|--:|---|"
    )
    for source in ("verified", "swegym"):
        targets = plan(source)
        pythons = {target.python for target in targets if target.python}
        systems = {target.system for target in targets if target.system}
        envs = [_env_mib(target, measured, light_mib) for target in targets]
        total = base_mib + len(pythons) * python_mib + sum(envs)
        total += sum(SYSTEM_MIB.get(name, 20) for names in systems for name in names)
        known = [measured[_key(t)]["seconds"] for t in targets if _key(t) in measured]
        minutes = (sum(known) + seconds * (len(targets) - len(known))) / 60
        unpacked = base_mib + len(pythons) * python_mib + _files_mib(targets, light_mib)
        row = [source, len(targets), len(known), f"~{total / 1024:.1f}", f"~{unpacked / 1024:.1f}"]
        row += [f"{MIRRORS[source] / 1024:.1f}", f"~{minutes:.0f}", OTHERS[source]]
        print("|", " | ".join(map(str, row)), "|")
    print(
        f"\nEstimated: {light_mib:.1f} MiB a pin (heavy packages apart), {seconds:.0f} s a build."
    )


def _key(target: Target) -> tuple[str, int]:
    """What tells a measured target from others of its (repo, version), whatever its digest is."""
    return target.name.rpartition("-")[0], len(target.pins)


def _light(row: dict) -> float:
    """MiB of a measured environment without its heavy packages."""
    (pins,) = {t.pins for t in plan(row["source"]) if _key(t) == (row["target"], row["pins"])}
    return row["bytes"]["environment"] / MIB - sum(_heavy(pin) for pin in pins)


def _heavy(pin: str) -> int:
    return HEAVY.get(re.sub("[-_.]+", "-", pin.split("==")[0]).lower(), 0)


def _env_mib(target: Target, measured: dict, light_mib: float) -> float:
    if row := measured.get(_key(target)):
        return (row["bytes"]["environment"] + row["bytes"]["wheels"]) / MIB
    pins = target.pins or ("",) * 60  # no pins yet: as many as a SWE-Gym environment has
    heavies = [_heavy(pin) for pin in pins]
    return sum(heavies) + heavies.count(0) * light_mib + 2


def _files_mib(targets: list[Target], light_mib: float) -> float:
    """What a store of `image unpack` holds besides base and CPythons: each Debian package once, and
    each pin once a Python; its files are equal in all images (docker/env/install)."""
    systems = {name for target in targets for name in target.system}
    unknown = ("",) * 60  # no pins yet: as many as a SWE-Gym environment has, shared with none
    pins = {(t.python, pin) for t in targets for pin in t.pins}
    sizes = [_heavy(pin) or light_mib for _, pin in pins]
    sizes += [_heavy(pin) or light_mib for t in targets if t.missing for pin in unknown]
    return sum(sizes) + sum(SYSTEM_MIB.get(name, 20) for name in systems) + 2 * len(targets)


if __name__ == "__main__":
    main()
