"""verify-format: does a dataset folder keep what its shape promises?

In: a folder of convert.py, or a folder of such folders. Out: the number of tasks, and the first
broken promise of each that breaks one: files, digests, upstream's schema, one image, a separate
verifier, no network asked for, and a solution that nothing but solution/ knows. Refuses (TaskError)
a folder without dataset.toml.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoswe_harbor.task import REMEDY, Task, TaskError, load_task, package_digest, read, task_paths


def format_faults(folder: Path) -> tuple[int, dict[str, str]]:
    """(tasks checked, {task folder: its fault}) for a dataset folder, or a folder of datasets."""
    datasets = [folder] if (folder / "dataset.toml").is_file() else []
    datasets = datasets or sorted(path.parent for path in folder.glob("*/dataset.toml"))
    if not datasets:
        raise TaskError(f"{folder}: no dataset.toml here or below; run nanoswe-harbor convert")
    checked, faults = 0, {}
    for dataset in datasets:
        listed = _listed(dataset)
        found = {path.name: path for path in task_paths(dataset)}
        for name in sorted(listed.keys() | found.keys()):
            checked += 1
            try:
                task = load_task(found.get(name, dataset / name))
                if listed.get(name) != package_digest(task.path):
                    raise TaskError(f"{task.path}: differs from dataset.toml; {REMEDY}")
                if fault := next(_broken(task, read(task.path / "task.toml", tomllib.loads)), ""):
                    raise TaskError(f"{task.path}: {fault}; {REMEDY}")
            except TaskError as error:
                faults[str(dataset / name)] = str(error)
    return checked, faults


def _listed(dataset: Path) -> dict[str, str]:
    """Task → digest. The registry has to name the same tasks."""
    registry = read(dataset / "registry.json", lambda text: {"": json.loads(text)})
    try:
        entries = read(dataset / "dataset.toml", tomllib.loads).get("tasks", [])
        listed = {entry["name"].split("/")[-1]: entry["digest"] for entry in entries}
        registered = [task["path"] for task in registry[""][0]["tasks"]]
    except (AttributeError, LookupError, TypeError) as error:
        raise TaskError(f"{dataset}: bad or missing field {error}; {REMEDY}") from error
    if registered != list(listed):
        raise TaskError(f"{dataset}: dataset.toml and registry.json name other tasks; {REMEDY}")
    return listed


def _broken(task: Task, config: dict[str, Any]) -> Iterator[str]:
    """The promises that a task does not keep."""
    verifier, environment = config.get("verifier", {}), config.get("environment", {})
    tests, dockerfile = task.path / "tests", task.path / "environment/Dockerfile"
    limit = re.search(r"timeout -k \d+ (\d+) ", (tests / "test.sh").read_text(errors="replace"))
    lines = dockerfile.read_text(errors="replace").splitlines()
    ending = ["ENTRYPOINT []", "STOPSIGNAL SIGKILL", f"WORKDIR {task.workdir}"]
    image = environment.get("docker_image", config["metadata"].get("image"))
    gold = (task.path / "solution/gold.patch").read_bytes()
    rest = [
        path for path in task.path.rglob("*") if path.is_file() and "solution" not in path.parts
    ]
    for kept, promise in (
        (config.get("schema_version") == "1.4", "schema_version is 1.4"),
        (task.name.partition("/")[2] == task.task_id, "[task].name ends in the folder's name"),
        (config["metadata"].get("instance_id") == task.task_id, "metadata has the instance id"),
        (config["metadata"].get("source"), "metadata names the source"),
        (lines[:4] == [f"FROM {image}", *ending], "the Dockerfile starts from docker_image"),
        (list(dockerfile.parent.iterdir()) == [dockerfile], "environment/ has nothing else"),
        (verifier.get("environment_mode") == "separate", "the verifier is separate"),
        (verifier.get("collect"), "a hook collects the patch"),
        ("environment" not in verifier, "the verifier has no image of its own"),
        (not (tests / "Dockerfile").exists(), "tests/ has no image of its own"),
        (limit and task.verifier_timeout_sec > float(limit[1]) + 60, "the verifier outlasts tests"),
        ("network_mode" not in environment, "no network mode is asked for"),
        (task.task_id not in task.instruction, "the instruction does not name the instance"),
        (all(gold not in path.read_bytes() for path in rest), "only solution/ has the gold patch"),
    ):
        if not kept:
            yield f"broken promise: {promise}"
