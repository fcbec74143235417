"""verify-format: does a dataset folder keep what its shape promises?

In: a folder of convert.py, or a folder of such folders. Out: the number of tasks, and the first
broken promise of each that breaks one: files, digests, upstream's schema, one image, a separate
verifier, no network asked for, and a solution that nothing but solution/ knows. Refuses (TaskError)
a folder without dataset.toml.
"""

import json
import re
import tomllib
from pathlib import Path

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
                if promise := _broken(task):
                    raise TaskError(f"{task.path}: it is not so that {promise}; {REMEDY}")
            except TaskError as error:
                faults[str(dataset / name)] = str(error)
            except (LookupError, TypeError, ValueError) as error:
                faults[str(dataset / name)] = f"{dataset / name}: bad or missing {error}; {REMEDY}"
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


def _broken(task: Task) -> str:
    """The first promise that a task does not keep, or nothing."""
    config = read(task.path / "task.toml", tomllib.loads)
    metadata, verifier, environment = config["metadata"], config["verifier"], config["environment"]
    tests, dockerfile = task.path / "tests", task.path / "environment/Dockerfile"
    (limit,) = map(int, re.findall(r"timeout -k \d+ (\d+) ", (tests / "test.sh").read_text()))
    image = environment.get("docker_image", metadata.get("image"))
    start = ["FROM " + image, "ENTRYPOINT []", "STOPSIGNAL SIGKILL", "WORKDIR " + task.workdir]
    gold = (task.path / "solution/gold.patch").read_bytes()
    texts = [path.read_bytes() for path in task.path.rglob("*") if path.is_file()]
    promises = {
        "schema_version is 1.4": config["schema_version"] == "1.4",
        "[task].name ends in the folder's name": task.name.partition("/")[2] == task.task_id,
        "metadata has source and instance": metadata["source"] and metadata["instance_id"],
        "the Dockerfile starts from docker_image": dockerfile.read_text().split("\n")[:4] == start,
        "environment/ has nothing else": list(dockerfile.parent.iterdir()) == [dockerfile],
        "the verifier is separate": verifier["environment_mode"] == "separate",
        "a hook collects the patch": verifier["collect"],
        "the verifier has the same image": "environment" not in verifier,
        "tests/ has no image": not (tests / "Dockerfile").exists(),
        "the verifier outlasts the tests": task.verifier_timeout_sec > limit + 60,
        "no network mode is asked for": "network_mode" not in environment,
        "the instruction does not name the instance": task.task_id not in task.instruction,
        "only solution/ has the gold patch": sum(gold in text for text in texts) == 1,
    }
    return next((promise for promise, kept in promises.items() if not kept), "")
