"""Task: a Harbor task folder, read.

In: a folder of `convert.py`, or any single-step Harbor task: its repo, base_commit, test lists and
parser are empty. Out: a frozen Task. Refuses (TaskError, one line: file, remedy) a folder that
lacks a file, and fields of the wrong kind.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoswe_harbor.instance import HarborError

REQUIRED = ("instruction.md", "tests/test.sh")
OURS = (
    "task.toml instruction.md environment/Dockerfile tests/test.sh tests/run_eval.sh tests/grade.py"
    " tests/parsers.py tests/policy.py tests/record.py tests/expected.json tests/test_patch.diff"
    " solution/solve.sh solution/gold.patch"
).split()
IGNORED = (".pyc", ".swp", ".swo", "~", ".DS_Store")  # by Harbor, as is __pycache__
REMEDY = "convert the dataset again"


class TaskError(HarborError):
    """A task folder is missing something or holds something unreadable."""


@dataclass(frozen=True)
class Task:
    """A Harbor folder, read. Paths inside the sandbox are absolute; `path` is on this machine, as
    is a `docker_image` that begins with a slash: a folder with the Dockerfile to build."""

    path: Path
    task_id: str
    name: str
    instruction: str
    docker_image: str
    workdir: str
    repo: str
    base_commit: str
    agent_timeout_sec: float
    verifier_timeout_sec: float
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    parser: str
    test_files: tuple[str, ...]
    memory_mb: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


def load_task(path: Path | str) -> Task:
    """Read one task folder. Raises TaskError."""
    if not (path := Path(path)).is_dir():
        raise TaskError(f"{path}: no such task folder; give a folder that holds task.toml")
    config = read(path / "task.toml", tomllib.loads)
    metadata = config.get("metadata", {})
    ours = "family" in metadata
    for name in OURS if ours else REQUIRED:
        if not (path / name).is_file():
            raise TaskError(f"{path / name}: missing; {REMEDY}")
    expected = read(path / "tests" / "expected.json", json.loads) if ours else {}
    instruction = (path / "instruction.md").read_bytes().decode(errors="replace")
    if not instruction.strip():
        raise TaskError(f"{path / 'instruction.md'}: empty; {REMEDY}")
    try:
        if "steps" in config:
            raise ValueError("steps (only single-step tasks are read)")
        environment = config.get("environment", {})
        return Task(
            path=path.resolve(),
            task_id=path.resolve().name,
            name=str(config.get("task", {}).get("name", path.resolve().name)),
            instruction=instruction,
            docker_image=str(environment.get("docker_image") or path.resolve() / "environment"),
            workdir=str(environment.get("workdir", "")),
            repo=str(metadata.get("repo", "")),
            base_commit=str(metadata["base_commit"]) if expected else "",
            agent_timeout_sec=float(config.get("agent", {}).get("timeout_sec", 3600)),
            verifier_timeout_sec=float(config.get("verifier", {}).get("timeout_sec", 600)),
            fail_to_pass=tuple(expected.get("fail_to_pass", ())),
            pass_to_pass=tuple(expected.get("pass_to_pass", ())),
            parser=str(expected.get("parser", "")),
            test_files=tuple(metadata["test_files"]) if expected else (),
            memory_mb=int(environment.get("memory_mb", 0)),
            metadata=dict(metadata),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{path / 'task.toml'}: bad or missing field {error}; {REMEDY}") from error


def load_tasks(folder: Path | str) -> list[Task]:
    """Read every task of a dataset folder, sorted by id. One broken task, or none, is an error."""
    folder = Path(folder)
    if (folder / "task.toml").is_file():
        return [load_task(folder)]
    if (folder / "train" / "dataset.toml").is_file():
        raise TaskError(f"{folder}: holds two datasets; give its train or heldout folder")
    if not (paths := task_paths(folder)):
        raise TaskError(f"{folder}: no tasks here; nanoswe-harbor convert (just tasks) makes them")
    return [load_task(path) for path in paths]


def task_paths(folder: Path) -> list[Path]:
    """The direct sub-folders of a dataset folder, sorted: every one of them has to be a task."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder; nanoswe-harbor convert (just tasks) makes it")
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def package_digest(path: Path) -> str:
    """Harbor's package digest of a task folder, `sha256:<hex>`."""
    packaged = [path / name for name in ("task.toml", "instruction.md", "README.md")]
    for folder in ("environment", "tests", "solution"):
        packaged += (path / folder).rglob("*")
    files = [p for p in packaged if p.is_file() and not p.name.endswith(IGNORED)]
    files = [p for p in files if "__pycache__" not in p.parts]
    return content_digest({p.relative_to(path).as_posix(): p.read_bytes() for p in files})


def content_digest(files: dict[str, bytes]) -> str:
    """The same of files by their relative path: over names and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def read(path: Path, loads: Callable[[str], Any]) -> dict[str, Any]:
    """A file that holds a table of names, decoded. Raises TaskError."""
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TaskError(f"{path}: missing; {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path}: does not parse ({error}); {REMEDY}") from error
    if not isinstance(found, dict):
        raise TaskError(f"{path}: not a table of names; {REMEDY}")
    return found
