"""images: the environment images of a source of rows, as targets for `docker buildx bake`.

In: nano, verified, swegym, or any source of rows. Out: a Target for each distinct environment (its
pins, as arguments of docker/env/Dockerfile; its tags, one for each (repo, version) that uses it),
and the bake file, merged with docker-bake.hcl. Refuses (ImagesError) a source without an
environment, a missing docker; a spec without exact pins is planned, and says why it is not built.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from nanoswe_harbor.envspec import EnvSpec, Profile, SpecError, built_name, known_specs, spec_of
from nanoswe_harbor.instance import HarborError, Instance
from nanoswe_harbor.sources import scan

BENCHMARKS = {"nano": "nano", "verified": "swebench", "swegym": "swegym"}
BAKE_FILE = "docker-bake.hcl"


class ImagesError(HarborError):
    """The images of a source cannot be planned, built or kept."""


@dataclass(frozen=True)
class Target:
    """One image to build. `missing` says why it cannot be; `skipped` are pins without a wheel."""

    name: str
    tags: tuple[str, ...]
    python: str
    pins: tuple[str, ...]
    build: tuple[str, ...]
    system: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: str


def plan(source: str, only: tuple[str, ...] = ()) -> list[Target]:
    """The distinct environments of a source whose alias (owner__repo-version) matches `only`."""
    users: dict[str, list[tuple[Profile, EnvSpec]]] = {}
    alias_of: dict[str, Counter[str]] = {}  # alias → how many use each digest
    for profile, spec in _specs(source):
        users.setdefault(spec.digest, []).append((profile, spec))
        alias = built_name(profile, spec).rpartition("-")[0]
        alias_of.setdefault(alias, Counter())[spec.digest] += 1
    targets = []
    for digest, found in users.items():
        tags = list(dict.fromkeys(built_name(*user) for user in found))
        names = [tag.partition(":")[2].rpartition("-")[0] for tag in tags]
        if not only or any(fnmatchcase(name, wanted) for name in names for wanted in only):
            # that of most rows; a benchmark's pairs list it first
            aliases = (a for a, users in alias_of.items() if users.most_common(1)[0][0] == digest)
            targets.append(_target(found[0][1], (*tags, *aliases)))
    if not targets:
        raise ImagesError(f"{source}: no environment to build; does one match --only?")
    return targets


def merged(generated: str) -> str:
    """The generated targets and all static ones, as bake sees them. Asks no daemon."""
    return "\n".join("\t".join(row) for row in script("merged", BAKE_FILE, stdin=generated))


def build(
    targets: list[Target], generated: str, logs: Path, keep_free_gb: float
) -> Iterator[dict[str, Any]]:
    """Build what is not there; what became of each target: its state is built, there, failed or
    planned (it cannot be built). What builds cost is added to builds.jsonl."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "envs.json").write_text(generated, encoding="utf-8")
    lines = "".join(f"{t.name}\t{' '.join(t.tags)}\t{t.missing}\n" for t in targets)
    argv = ("build", BAKE_FILE, str(logs / "envs.json"), str(logs), str(keep_free_gb))
    for state, seconds, size, name, *why in script(*argv, stdin=lines):
        built = {"schema": "build/1", "target": name, "state": state, "seconds": float(seconds)}
        built |= {"image_bytes": int(size), "why": why}
        if state in ("built", "failed"):
            with (logs / "builds.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(built) + "\n")
        yield built


def script(*argv: str, stdin: str = "") -> Iterator[list[str]]:
    """The rows that templates/images.sh prints, as they come."""
    path = Path(__file__).with_name("templates") / "images.sh"
    with tempfile.TemporaryFile("w+") as given:
        given.write(stdin)
        given.seek(0)
        command = ["bash", str(path), *argv]
        with Popen(command, stdin=given, stdout=PIPE, stderr=PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            yield from (line.rstrip("\n").split("\t") for line in process.stdout)
            said = process.stderr.read().strip()
    if process.returncode:
        raise ImagesError(said[-500:] or f"{path} {argv[0]} failed")


def _specs(source: str) -> Iterator[tuple[Profile, EnvSpec]]:
    if source in BENCHMARKS:
        yield from known_specs(BENCHMARKS[source])
        return
    for row in scan(source):
        if isinstance(row, Instance) and row.family == "swe-bench":
            with suppress(SpecError):  # convert says so
                yield spec_of(row.model_copy(update={"image": ""}))  # which is not ours to build


def _target(spec: EnvSpec, tags: tuple[str, ...]) -> Target:
    name = "env-" + re.sub(r"[^a-z0-9_-]", "_", tags[0].split(":")[1])
    python, pins, skipped = spec.contents or (spec.python, (), ())
    build = spec.build or tuple(pin for pin in pins if re.match("(setuptools|wheel)==", pin))
    missing = "" if spec.contents else "no exact pins: tools/make_pins.py makes them"
    return Target(name, tags, python, pins, build, spec.system, skipped, missing)
