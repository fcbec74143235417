"""image_plan.py: images, unique bytes and build minutes of all of Verified and all of SWE-Gym.

In: the plans; images.jsonl, what each image built here has in its layers, and how long it took;
unpacked.json (unpacked.py), what the store of those images holds and each pin there. Out: a table.
What is not measured is estimated, and marked so, by one rule. A pin takes what it was measured to
take: that very pin for this Python, or for another one; or the mean of that name's other versions;
or HEAVY; or the mean of all names that were measured and are light. Layers are a sum over images,
each environment in full. A store has each CPython and each Debian package once; of a pin what is
for one Python once for that Python, and what is the same for all once; and each image's folders.
Debian's packages by apt (system.json, of system_sizes.py). Below the table: what the rule gives for
the images unpacked here, beside what they take.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from nanoswe_harbor.images import Target, plan

HERE = Path(__file__).parent
MIB = 2**20
LIGHT_MIB = 8  # what takes less is light
# Installed MiB of wheels that take more, off their releases of those years, where not measured.
HEAVY = {
    "pyqt5": 190, "pyqt5-qt5": 190, "pyarrow": 125, "llvmlite": 120, "scipy": 110, "botocore": 90,
    "numpy": 65, "pandas": 65, "rasterio": 60, "statsmodels": 45, "mypy": 45, "scikit-learn": 40,
    "babel": 33, "selenium": 30, "matplotlib": 30, "numba": 28, "pyproj": 25, "cartopy": 22,
    "netcdf4": 20, "fonttools": 20, "lxml": 18, "sphinx": 13, "pillow": 12, "h5py": 12,
    "cryptography": 11,
}  # fmt: skip
# MiB of the repositories with all their history, of which every checkout is made: an environment
# image has none. What a clone brings, branches and tags: 318 of the 556 MiB that the stored copies
# of requests, flask, sphinx and sympy have with all pull requests (`git rev-list --disk-usage`),
# and that share of the stored size of the others.
CLONE = 318 / 556
MIRRORS = {"verified": 3458 * CLONE, "swegym": 2020 * CLONE}
OTHERS = {
    "verified": "official 189 GiB, best public set 30 GiB",
    "swegym": "official not published",
}
UNKNOWN = ("",) * 60  # no pins yet: as many as a SWE-Gym environment has, shared with none
Size = Callable[[str, str], tuple[float, float]]  # KiB of a pin: for one Python, the same for all


def main() -> None:
    lines = (HERE / "images.jsonl").read_text().splitlines()
    measured = {(row["target"], row["pins"]): row for row in map(json.loads, lines)}
    store = json.loads((HERE / "unpacked.json").read_text())
    system = json.loads((HERE / "system.json").read_text())
    size = sizes(store["pins"])
    rows = [row for row in measured.values() if row["pins"]]
    seconds = mean(row["seconds"] for row in rows)
    print(
        "| set | images | measured | layers GiB | unpacked GiB | repositories GiB | build minutes "
        "| others |\n|---|--:|--:|--:|--:|--:|--:|---|"
    )
    for source in ("verified", "swegym"):
        targets = plan(source)
        built = [target for target in targets if _key(target) in measured]
        own = [measured[_key(target)] for target in built]
        minutes = (sum(row["seconds"] for row in own) + seconds * (len(targets) - len(own))) / 60
        layers = _layers_mib(targets, measured, system, size)
        unpacked = _store_mib(targets, rows[0], store, system, size)
        row = [source, len(targets), len(own), f"~{layers / 1024:.1f}", f"~{unpacked / 1024:.1f}"]
        row += [f"{MIRRORS[source] / 1024:.1f}", f"~{minutes:.0f}", OTHERS[source]]
        print("|", " | ".join(map(str, row)), "|")
    names = {image.rpartition("-")[0] for image in store["images"]}
    there = [
        t for t in plan("verified") if _key(t) in measured and t.tags[0].rpartition("-")[0] in names
    ]
    rule = _store_mib(there, rows[0], store, system, size)
    print(f"\nThe {len(store['images'])} unpacked here take {store['bytes'] / MIB:.0f} MiB, by the")
    print(f"rule {rule:.0f}. A build takes {seconds:.0f} s, a pin that is not heavy", end=" ")
    print(f"{sum(size('', '')) / 1024:.1f} MiB.")


def sizes(pins: dict[str, dict[str, tuple[int, int]]]) -> Size:
    """KiB of any pin for any Python, by what was measured."""
    exact, by_name = defaultdict[str, list](list), defaultdict[str, list](list)
    for found in pins.values():
        for pin, kibs in found.items():
            exact[pin].append(kibs)
            by_name[pin.partition("==")[0]].append(kibs)
    means = map(_mean, by_name.values())
    light = _mean([pair for pair in means if sum(pair) < LIGHT_MIB * 1024])

    def size(python: str, pin: str) -> tuple[float, float]:
        name, _, version = pin.partition("==")
        name = re.sub("[-_.]+", "-", name).lower()
        pin = f"{name}=={version}"
        if pin in pins.get(python, {}):
            return pins[python][pin]
        if known := exact.get(pin) or by_name.get(name):
            return _mean(known)
        return (HEAVY[name] * 1024, 0) if name in HEAVY else light

    return size


def _mean(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return mean(pair[0] for pair in pairs), mean(pair[1] for pair in pairs)


def _key(target: Target) -> tuple[str, int]:
    """What tells a measured target from others of its (repo, version), whatever its digest is."""
    return target.name.rpartition("-")[0], len(target.pins)


def _layers_mib(targets: list[Target], measured: dict, system: dict, size: Size) -> float:
    """Base; each set of system packages; a CPython upon each of them; each environment."""
    some = next(iter(measured.values()))["bytes"]
    pythons = {(target.python, target.system) for target in targets if target.python}
    sets = {" ".join(names) for _, names in pythons if names}
    total = some["base"] / MIB + len(pythons) * some["python"] / MIB
    total += sum(sum(system[names].values()) for names in sets) / 1024
    for target in targets:
        if row := measured.get(_key(target)):
            total += (row["bytes"]["environment"] + row["bytes"]["wheels"]) / MIB
        else:
            pins = target.pins or UNKNOWN
            total += sum(sum(size(target.python, pin)) for pin in pins) / 1024 + 1
    return total


def _store_mib(targets: list[Target], row: dict, store: dict, system: dict, size: Size) -> float:
    """Base; each CPython; each Debian package; each pin of a Python; folders and what is an
    image's own."""
    pythons = {target.python for target in targets if target.python}
    total = (row["bytes"]["base"] + len(pythons) * row["bytes"]["python"]) / MIB
    packages = {name: kib for t in targets if t.system for name, kib in system[_names(t)].items()}
    total += sum(packages.values()) / 1024
    keys = {(t.python, pin) for t in targets for pin in t.pins}
    total += sum(size(*key)[0] for key in keys) / 1024
    total += sum({pin: size(python, pin)[1] for python, pin in sorted(keys)}.values()) / 1024
    total += sum(sum(size("", pin)) for t in targets if t.missing for pin in UNKNOWN) / 1024
    return total + len(targets) * (store["folders"] / len(store["images"]) / MIB + 1)


def _names(target: Target) -> str:
    return " ".join(target.system)


if __name__ == "__main__":
    main()
