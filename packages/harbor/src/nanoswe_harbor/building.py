"""building: the targets of a plan, one after the other, by `docker buildx bake`.

In: targets, the bake file, where logs go. Out: a Built for each: a failure never stops the others,
what has its tag already is not built again, and a disk that is nearly full ends it. Each line of
builds.jsonl is what one build cost. Refuses (ImagesError) a missing docker, bake file or daemon.
"""

import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from nanoswe_harbor.images import BAKE_FILE, ImagesError, Target, run

GIB = 2**30


@dataclass(frozen=True)
class Built:
    """What became of a target: built, there (already), failed, planned (it cannot be built)."""

    target: str
    state: str
    seconds: float = 0.0
    image_bytes: int = 0
    why: str = ""


def build(
    targets: Iterable[Target], generated: str, logs: Path, keep_free_gb: float
) -> Iterator[Built]:
    """Build what is not there. Raises ImagesError before the disk has less than `keep_free_gb`."""
    root = Path(json.loads(run(["docker", "info", "--format", "{{json .DockerRootDir}}"])))
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / "envs.json"
    file.write_text(generated, encoding="utf-8")
    for target in targets:
        if target.missing:
            yield Built(target.name, "planned", why=target.missing)
        elif size := image_bytes(target.tags[0]):
            yield Built(target.name, "there", image_bytes=size)
        else:
            free = shutil.disk_usage(root if root.exists() else logs).free
            if free < keep_free_gb * GIB:
                why = f"{free / GIB:.1f} GiB are free, less than --keep-free-gb {keep_free_gb:g}"
                raise ImagesError(f"{target.name}: not begun: {why}; make room, then run again")
            yield _record(_build(target, file, logs / f"{target.name}.log"), target, logs)


def table(results: list[Built]) -> str:
    """A line for each, the failed ones last, with the end of their logs."""
    lines = []
    for result in sorted(results, key=lambda result: result.state == "failed"):
        cost = f"{result.seconds:7.1f} s {result.image_bytes / 2**20:7.0f} MiB"
        lines.append(f"{result.state:8} {cost}  {result.target}")
        lines += [f"    {line}" for line in result.why.splitlines()]
    counts = Counter(result.state for result in results)
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items())])


def image_bytes(tag: str) -> int:
    """The size of an image that is here, or 0."""
    argv = ["docker", "image", "inspect", "--format", "{{.Size}}", tag]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return 0 if done.returncode else int(done.stdout)


def _build(target: Target, file: Path, log: Path) -> Built:
    argv = ["docker", "buildx", "bake", "-f", BAKE_FILE, "-f", str(file), "--progress", "plain"]
    began = time.monotonic()
    with log.open("wb") as out:
        done = subprocess.run(
            [*argv, target.name], stdout=out, stderr=subprocess.STDOUT, check=False
        )
    seconds = round(time.monotonic() - began, 1)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return Built(target.name, "failed", seconds, why="\n".join(_telling(lines)))
    return Built(target.name, "built", seconds, image_bytes(target.tags[0]))


def _telling(lines: list[str]) -> list[str]:
    """The end of what the failed step printed, which bake repeats between two rules; or the end."""
    rules = [number for number, line in enumerate(lines) if line == "------"]
    said = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    return [line[:200] for line in said if line.strip()][-6:]


def _record(built: Built, target: Target, logs: Path) -> Built:
    with (logs / "builds.jsonl").open("a", encoding="utf-8") as file:
        fields = {**asdict(built), "tags": target.tags, "skipped": target.skipped}
        file.write(json.dumps({"schema": "build/1", **fields}) + "\n")
    return built
