"""convert: Instances to a dataset of Harbor task folders, byte for byte the same every time.

In: rows and an output folder. Out: one folder per row, dataset.toml and registry.json; for nano
also the mirror. All is written to a hidden sibling and renamed at the end, so an error, Ctrl-C or a
full disk leaves nothing behind. Refuses (ConvertError) duplicate ids, no rows, a folder name with
`__`, and an output folder that it did not write.
"""

import functools
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from nanoswe_harbor.envspec import (
    base_files,
    find_spec,
    image_name,
    patched_files,
    test_command,
)
from nanoswe_harbor.instance import HarborError, Instance
from nanoswe_harbor.nano import SPLITS, build, cases
from nanoswe_harbor.task import package_digest
from nanoswe_harbor.verdicts import expectations

OnTask = Callable[[str], None]  # told the id of every task written


class ConvertError(HarborError):
    """The dataset cannot be written."""


def convert(
    rows: Iterable[Instance], out: Path, source: str, on_task: OnTask = lambda _: None
) -> int:
    """Write `rows` as the dataset folder `out`, replacing an older one. The number of tasks."""
    with _replacing(out) as folder:
        return write_dataset(rows, folder, out.name, source, on_task)


def convert_nano(
    out: Path, counts: dict[str, int], seed: int = 0, on_task: OnTask = lambda _: None
) -> int:
    """Write `out/mirror` and a dataset per split (`counts`: split → tasks). The number of tasks."""
    total = 0
    with _replacing(out) as folder:
        for split in SPLITS:
            rows = build(cases(split, counts[split], seed), folder / "mirror")
            name = f"{out.name}-{split}"
            total += write_dataset(rows, folder / split, name, f"nano seed {seed}", on_task)
    return total


def write_dataset(
    rows: Iterable[Instance], folder: Path, name: str, source: str, on_task: OnTask
) -> int:
    """Write the tasks of one dataset, then its dataset.toml and registry.json."""
    tasks: dict[str, dict[str, str]] = {}
    for row in rows:
        if row.instance_id in tasks:
            raise ConvertError(f"{source}: {row.instance_id} appears twice; remove one of the rows")
        path = folder / row.instance_id
        task_name = write_task(row, path, source)
        tasks[row.instance_id] = {"name": task_name, "digest": package_digest(path)}
        on_task(row.instance_id)
    if not tasks:
        raise ConvertError(f"{source}: no rows; nothing to convert")
    ordered = [tasks[key] for key in sorted(tasks)]
    context = {"name": f"nanoswe/{name}", "description": f"Tasks from {source}", "tasks": ordered}
    _write(folder / "dataset.toml", _render("dataset.toml.j2", context))
    registry = {
        "name": name,
        "version": "1.0.0",
        "description": context["description"],
        "tasks": [{"name": tasks[key]["name"], "path": key} for key in sorted(tasks)],
        "metrics": [{"type": "mean", "kwargs": {}}],
    }
    _write(folder / "registry.json", json.dumps([registry], indent=1) + "\n")
    return len(tasks)


def write_task(instance: Instance, path: Path, source: str) -> str:
    """Write one task folder; the task's name. Raises SpecError for a row without an environment."""
    profile, spec = find_spec(instance.repo, instance.version)
    files, old = patched_files(instance.test_patch), base_files(instance.test_patch)
    name = f"nanoswe/{instance.instance_id}"
    context = {
        "instance": instance,
        "profile": profile,
        "spec": spec,
        "source": source,
        "name": name,
        "image": image_name(instance, profile, spec),
        # Half of the published statements use CRLF; an agent's prompt is better without.
        "problem": instance.problem_statement.replace("\r\n", "\n").rstrip(),
        "test_files": files,
        "old_files": old,
        "new_files": tuple(f for f in files if f not in old),
        "command": test_command(spec, instance.test_patch),
    }
    expected = {
        **expectations(instance, spec.parser),
        "test_files": files,
        "gold_files": patched_files(instance.patch),
    }
    contents = {
        "task.toml": _render("task.toml.j2", context),
        "instruction.md": _render("instruction.md.j2", context),
        "environment/Dockerfile": _render("Dockerfile.j2", context),
        "tests/test.sh": _render("test.sh.j2", context),
        "tests/run_eval.sh": _render("run_eval.sh.j2", context),
        "tests/expected.json": json.dumps(expected, indent=1) + "\n",
        "tests/test_patch.diff": instance.test_patch,
        "solution/solve.sh": _render("solve.sh.j2", context),
        "solution/gold.patch": instance.patch,
        **_grader_files(),
    }
    for relative, text in contents.items():
        _write(path / relative, text)
    return name


@functools.cache
def _grader_files() -> dict[str, str]:
    folder = resources.files("nanoswe_harbor") / "grader"
    names = ("grade.py", "parsers.py", "policy.py", "record.py")
    return {f"tests/{name}": (folder / name).read_text(encoding="utf-8") for name in names}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if path.suffix == ".sh":
        path.chmod(0o755)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a hidden sibling of `out` that takes its place on success and vanishes on any error."""
    if "__" in out.name or out.name.startswith("."):
        raise ConvertError(f"{out}: harbor cannot score a dataset folder of this name; avoid `__`")
    ours = any((out / name).is_file() for name in ("dataset.toml", "train/dataset.toml"))
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise ConvertError(f"{out}: exists and is not a converted dataset; give another --out")
    scratch: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        new, old = scratch / "new", scratch / "old"
        new.mkdir()
        yield new
        if out.exists():
            out.rename(old)
        new.rename(out)
    except OSError as error:
        raise ConvertError(f"{out}: cannot write: {error.strerror or error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _quote(value: str | Iterable[str]) -> str:
    return shlex.join([value] if isinstance(value, str) else value)


def _toml(value: str | Iterable[str]) -> str:
    """A TOML value: JSON's strings and arrays are TOML's, once DEL is escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nanoswe_harbor"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(toml=_toml, shell=_quote)
    return environment


def _render(template: str, context: dict[str, Any]) -> str:
    return _environment().get_template(template).render(context)
