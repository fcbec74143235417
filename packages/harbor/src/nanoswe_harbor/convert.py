"""convert: Instances to a dataset of Harbor task folders, byte for byte the same every time.

In: rows. Out: a folder per row, dataset.toml, registry.json, rejected.jsonl. All is written to a
hidden sibling, with links to what has not changed, and renamed at the end: an error leaves
nothing. Refuses (ConvertError) no rows, a folder name with `__`, an output folder that it did not
write.
"""

import base64
import functools
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from nanoswe_harbor.checkout import SAFE, bare_repository, check_patches
from nanoswe_harbor.envspec import image_name, spec_of
from nanoswe_harbor.instance import HarborError, Instance
from nanoswe_harbor.nano import SPLITS, cases
from nanoswe_harbor.nano.build import build
from nanoswe_harbor.patches import changes
from nanoswe_harbor.sources import Rejected, Row
from nanoswe_harbor.task import OURS, content_digest
from nanoswe_harbor.verdicts import expectations

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("nanoswe_harbor"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters.update(  # TOML's strings and arrays are JSON's, once DEL is escaped
    json=lambda value: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f"),
    base64=lambda text: base64.b64encode(text.encode()).decode(),
    shell=shlex.join,
)
RENDERED = [name for name in OURS if f"{Path(name).name}.j2" in TEMPLATES.list_templates()]
OnRow = Callable[[], None]  # told of every row, task or not
Converted = tuple[int, int, list[Rejected]]  # tasks, those that were there already, no tasks
Made = Rejected | tuple[str, dict[str, bytes]]  # a task's id and files


class ConvertError(HarborError):
    """The dataset cannot be written."""


def convert(
    rows: Iterable[Row],
    out: Path,
    source: str,
    on_row: OnRow = lambda: None,
    images: str = "published",
    jobs: int = 1,
    mirror: str = "",
) -> Converted:
    """Write `rows` as the dataset folder `out`, replacing an older one. With a mirror (a folder of
    bare repositories, or a URL above them) a row whose patches do not apply there is rejected."""

    def work(row: Row) -> Made:
        if isinstance(row, Rejected):
            return row
        try:
            if mirror:
                bare = bare_repository(mirror, row.repo, out.with_name(f"{out.name}.mirror"))
                patches = [row.bug_patch] if row.bug_patch else [row.patch, row.test_patch]
                check_patches(bare, row.base_commit, patches)
            return row.instance_id, task_files(row, source, images)
        except HarborError as error:
            return Rejected(source, row.instance_id, str(error))

    pool = ThreadPoolExecutor(jobs)  # threads: what takes long is git and the disk
    try:
        with _replacing(out) as folder:
            return _write_dataset(pool.map(work, rows), folder, out, source, on_row)
    finally:
        pool.shutdown(cancel_futures=True)


def convert_nano(
    out: Path, counts: dict[str, int], seed: int = 0, on_row: OnRow = lambda: None
) -> int:
    """Write `out/mirror` and a dataset per split (`counts`: split → tasks). The number of tasks."""
    total = 0
    with _replacing(out) as folder:
        for split in SPLITS:
            rows = (build(case, folder / "mirror") for case in cases(split, counts[split], seed))
            name, source = out.with_name(f"{out.name}-{split}"), f"nano seed {seed}"
            made = ((row.instance_id, task_files(row, source)) for row in rows)
            total += _write_dataset(made, folder / split, name, source, on_row)[0]
    return total


def task_files(row: Instance, source: str, images: str = "published") -> dict[str, bytes]:
    """The files of a row's task, by relative path. Raises SpecError without an environment."""
    profile, spec = spec_of(row)
    context = {
        "instance": row,
        "profile": profile,
        "spec": spec,
        "source": row.source or source,
        "image": image_name(row, profile, spec, images),
        "changes": changes(row.test_patch) if row.test_patch else [],
        "gold": changes(row.patch),
        "expected": expectations(row, spec.parser or "pytest"),
        "safe": shlex.join(SAFE),
    }
    files = {name: render(f"{Path(name).name}.j2", context) for name in RENDERED}
    files |= {"tests/test_patch.diff": row.test_patch, "solution/gold.patch": row.patch}
    files |= {"tests/eval_script.sh": row.eval_script} if row.eval_script else {}
    return {name: text.encode() for name, text in {**files, **_grader_files()}.items()}


def _write_dataset(
    results: Iterable[Made], folder: Path, out: Path, source: str, on_row: OnRow
) -> Converted:
    """Write the tasks of one dataset, then its dataset.toml and registry.json."""
    tasks: dict[str, str] = {}
    rejected: list[Rejected] = []
    unchanged = 0
    for result in results:
        on_row()
        if isinstance(result, Rejected):
            rejected.append(result)
            continue
        key, files = result
        if key in tasks:
            rejected.append(Rejected(source, key, "appears twice; the first was taken"))
            continue
        unchanged += _write(folder / key, files, out / key)
        tasks[key] = content_digest(files)
    if not tasks and not rejected:
        raise ConvertError(f"{source}: no rows; nothing to convert")
    context = {"name": out.name, "source": source, "tasks": sorted(tasks.items())}
    for name in ["dataset.toml", "registry.json"] + ["rejected.jsonl"] * bool(rejected):
        _write(folder, {name: render(f"{name}.j2", {**context, "rejected": rejected}).encode()})
    return len(tasks), unchanged, rejected


@functools.cache
def _grader_files() -> dict[str, str]:
    folder = resources.files("nanoswe_harbor") / "grader"
    names = [name for name in OURS if name.endswith(".py") and name not in RENDERED]
    return {name: (folder / Path(name).name).read_text(encoding="utf-8") for name in names}


def _write(folder: Path, files: dict[str, bytes], old: Path | None = None) -> bool:
    """Write files, or link to those of `old` with the same content; were all there already?"""
    same = old is not None
    for parent in {(folder / name).parent for name in files}:
        parent.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if old and (old / name).is_file() and (old / name).read_bytes() == content:
            os.link(old / name, folder / name)
        else:
            same = False
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return same


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


def render(template: str, context: dict[str, Any]) -> str:
    """The text of a template of this package."""
    return TEMPLATES.get_template(template).render(context)
