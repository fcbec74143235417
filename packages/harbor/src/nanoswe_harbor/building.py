"""building: the targets of a plan, one after the other, by `docker buildx bake`.

In: targets, the generated bake file, where logs go. Out: a Built for each: a failure never stops
the others, what has its tag is not built again, a disk that is nearly full ends it. Each line of
builds.jsonl is what one build cost. Refuses (ImagesError) a missing docker, bake file or daemon.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoswe_harbor.images import BAKE_FILE, ImagesError, Target, docker

GIB = 2**30


@dataclass(frozen=True)
class Built:
    """What became of a target: built, there (already), failed, planned (it cannot be built)."""

    target: str
    state: str
    seconds: float = 0.0
    image_bytes: int = 0
    why: tuple[str, ...] = ()


def build(
    targets: Iterable[Target], generated: str, logs: Path, keep_free_gb: float
) -> Iterator[Built]:
    """Build what is not there. Raises ImagesError before the disk has less than `keep_free_gb`."""
    disk = Path(docker("info", "--format", "{{.DockerRootDir}}").strip())
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / "envs.json"
    file.write_text(generated, encoding="utf-8")
    for target in targets:
        if target.missing:
            yield Built(target.name, "planned", why=(target.missing,))
        elif size := _size(target):
            yield Built(target.name, "there", image_bytes=size)
        else:
            free = shutil.disk_usage(disk if disk.exists() else logs).free / GIB
            if free < keep_free_gb:
                why = f"{free:.1f} GiB are free, less than --keep-free-gb {keep_free_gb:g}"
                raise ImagesError(f"{target.name}: not begun: {why}; make room, then run again")
            built = _build(target, file, logs / f"{target.name}.log")
            with (logs / "builds.jsonl").open("a", encoding="utf-8") as record:
                fields = {"schema": "build/1", **asdict(built), "skipped": target.skipped}
                record.write(json.dumps(fields) + "\n")
            yield built


def _build(target: Target, file: Path, log: Path) -> Built:
    argv = ["docker", "buildx", "bake", "-f", BAKE_FILE, "-f", str(file), "--progress", "plain"]
    began = time.monotonic()
    with log.open("wb") as out:
        code = subprocess.run([*argv, target.name], stdout=out, stderr=out, check=False).returncode
    seconds = round(time.monotonic() - began, 1)
    if not code:
        return Built(target.name, "built", seconds, _size(target))
    # bake repeats the end of what the failed step printed, between two rules
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    rules = [number for number, line in enumerate(lines) if line == "------"]
    said = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    why = tuple(line[:200] for line in said if line.strip())[-6:]
    return Built(target.name, "failed", seconds, why=why)


def _size(target: Target) -> int:
    """The bytes of a target's image, 0 where it is not here."""
    found = docker("image", "ls", "--format", "{{.ID}}", target.tags[0]).split()
    return int(docker("image", "inspect", "--format", "{{.Size}}", found[0])) if found else 0
