"""Task: a Harbor task folder, read.

In: a folder written by `convert.py` (or one of the same shape). Out: a frozen Task. Refuses a
folder without task.toml, instruction, tests, solution or Dockerfile, or with fields of the wrong
kind: TaskError, one line that names the file and what to do.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoswe_harbor.instance import HarborError

REQUIRED_FILES = (
    "task.toml",
    "instruction.md",
    "environment/Dockerfile",
    "tests/test.sh",
    "tests/run_eval.sh",
    "tests/grade.py",
    "tests/parsers.py",
    "tests/policy.py",
    "tests/record.py",
    "tests/expected.json",
    "tests/test_patch.diff",
    "solution/solve.sh",
    "solution/gold.patch",
)
REMEDY = "convert the dataset again"


class TaskError(HarborError):
    """A task folder is missing something or holds something unreadable."""


@dataclass(frozen=True)
class Task:
    """A Harbor folder, read. Paths inside the sandbox are absolute; `path` is on this machine."""

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
    memory_mb: int
    cpus: int
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    parser: str
    test_files: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


def load_task(path: Path | str) -> Task:
    """Read one task folder. Raises TaskError (one line naming the file and the remedy)."""
    path = Path(path)
    if not path.is_dir():
        raise TaskError(f"{path}: no such task folder; give a folder that holds task.toml")
    for name in REQUIRED_FILES:
        if not (path / name).is_file():
            raise TaskError(f"{path / name}: missing; {REMEDY}")
    config = _read_toml(path / "task.toml")
    expected = _read_expected(path / "tests" / "expected.json")
    instruction = (path / "instruction.md").read_text(encoding="utf-8")
    if not instruction.strip():
        raise TaskError(f"{path / 'instruction.md'}: empty; {REMEDY}")
    try:
        metadata, environment = config["metadata"], config["environment"]
        return Task(
            path=path.resolve(),
            task_id=path.resolve().name,
            name=str(config["task"]["name"]),
            instruction=instruction,
            docker_image=str(environment["docker_image"]),
            workdir=str(environment["workdir"]),
            repo=str(metadata["repo"]),
            base_commit=str(metadata["base_commit"]),
            agent_timeout_sec=float(config["agent"]["timeout_sec"]),
            verifier_timeout_sec=float(config["verifier"]["timeout_sec"]),
            memory_mb=int(environment["memory_mb"]),
            cpus=int(environment["cpus"]),
            fail_to_pass=tuple(expected["fail_to_pass"]),
            pass_to_pass=tuple(expected["pass_to_pass"]),
            parser=str(expected["parser"]),
            test_files=tuple(metadata["test_files"]),
            metadata=dict(metadata),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{path / 'task.toml'}: bad or missing field {error}; {REMEDY}") from error


def load_tasks(folder: Path | str) -> list[Task]:
    """Read every task of a dataset folder, sorted by id. One broken task, or none, is an error."""
    folder = Path(folder)
    if (folder / "task.toml").is_file():
        return [load_task(folder)]
    if (folder / "train" / "dataset.toml").is_file():
        raise TaskError(f"{folder}: holds two datasets; give its train or heldout folder")
    paths = task_paths(folder)
    if not paths:
        raise TaskError(f"{folder}: no task folders here; run nanoswe-harbor convert first")
    return [load_task(path) for path in paths]


def task_paths(folder: Path) -> list[Path]:
    """The direct sub-folders of a dataset folder, sorted: every one of them has to be a task."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder; run nanoswe-harbor convert first")
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def format_faults(folder: Path) -> tuple[int, dict[str, str]]:
    """(tasks checked, {task folder: its fault}) for a dataset folder, or a folder of datasets."""
    datasets = [folder] if (folder / "dataset.toml").is_file() else []
    datasets = datasets or sorted(path.parent for path in folder.glob("*/dataset.toml"))
    if not datasets:
        raise TaskError(f"{folder}: no dataset.toml here or below; run nanoswe-harbor convert")
    checked, faults = 0, {}
    for dataset in datasets:
        entries = _read_toml(dataset / "dataset.toml").get("tasks", [])
        listed = {entry["name"].split("/")[-1]: entry["digest"] for entry in entries}
        found = {path.name: path for path in task_paths(dataset)}
        for name in sorted(listed.keys() | found.keys()):
            checked += 1
            try:
                task = load_task(found.get(name, dataset / name))
                if listed.get(name) != package_digest(task.path):
                    raise TaskError(f"{task.path}: differs from dataset.toml; {REMEDY}")
            except TaskError as error:
                faults[str(dataset / name)] = str(error)
    return checked, faults


def package_digest(path: Path) -> str:
    """Harbor's package digest of a task folder, `sha256:<hex>`, over file names and contents."""
    packaged = [path / name for name in ("task.toml", "instruction.md", "README.md")]
    for folder in ("environment", "tests", "solution"):
        packaged += (path / folder).rglob("*")
    files = {p.relative_to(path).as_posix(): p for p in packaged if p.is_file() and not _ignored(p)}
    digest = hashlib.sha256()
    for name in sorted(files):
        content = hashlib.sha256(files[name].read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _ignored(path: Path) -> bool:
    # Harbor's default ignores: __pycache__/ *.pyc .DS_Store *.swp *.swo *~
    junk = path.name.endswith((".pyc", ".swp", ".swo", "~")) or path.name == ".DS_Store"
    return junk or "__pycache__" in path.parts


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: not TOML ({error}); {REMEDY}") from error


def _read_expected(path: Path) -> dict[str, Any]:
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TaskError(f"{path}: not JSON ({error}); {REMEDY}") from error
    if not isinstance(expected, dict) or not expected.get("fail_to_pass"):
        raise TaskError(f"{path}: no fail_to_pass tests; {REMEDY}")
    return expected
