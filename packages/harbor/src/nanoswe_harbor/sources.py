"""Sources: where Instances come from.

In: an alias, a file (SUFFIXES), `-` (JSON lines on stdin), a folder of Harbor tasks, or a
hub name. Out: Instances and Rejected rows, as they are consumed. Refuses (SourceError, one line)
what is missing, cut off, or no parquet file.
"""

import gzip
import hashlib
import io
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from nanoswe_harbor.envspec import spec_of
from nanoswe_harbor.families import BAD_ROW, adapt
from nanoswe_harbor.instance import HarborError, Instance
from nanoswe_harbor.patches import reverse
from nanoswe_harbor.task import load_task, task_paths

HUB = "princeton-nlp/SWE-bench_"
ALIASES = {"verified": f"{HUB}Verified", "lite": f"{HUB}Lite", "swegym": "SWE-Gym/SWE-Gym"}
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")


class SourceError(HarborError):
    """A source of rows is missing, or holds nothing that is an Instance."""


class Rejected(NamedTuple):
    """A row that is no Instance, and why."""

    where: str
    instance_id: str
    reason: str


Row = Instance | Rejected


def label(source: str) -> str:
    """What to call a source in output: never a path of this machine."""
    if source.endswith(SUFFIXES) or Path(source).is_dir():
        return Path(source).resolve().name
    return "stdin" if source == "-" else ALIASES.get(source, source)


def read_rows(source: str) -> Iterator[Instance]:
    """Every row of a source, in its order. Raises SourceError at the first that is rejected."""
    for row in scan(source):
        if isinstance(row, Rejected):
            raise SourceError(f"{row.where}: {row.reason}; want rows of a known dataset")
        yield row


def read_row(source: str, instance_id: str) -> Instance:
    """One row by id. Raises SourceError when the source does not have it, or only broken."""
    row = next((row for row in scan(source) if row.instance_id == instance_id), None)
    if isinstance(row, Instance):
        return row
    raise SourceError(f"{row.where}: {row.reason}" if row else f"{source}: no row {instance_id}")


def scan(source: str) -> Iterator[Row]:
    """Every row of a source, in its order, whether it is an Instance or not."""
    return (_row(where, raw) for where, raw in _raw(source))


def select(
    rows: Iterable[Row],
    only: tuple[str, ...] = (),
    limit: int | None = None,
    sample: int | None = None,
    stratify: str | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    """Rows whose id matches `only`, the first `limit` of them, a sample of those: the same on every
    machine, with a fair share of each value of `stratify`."""
    matching = (row for row in rows if any(fnmatchcase(row.instance_id, name) for name in only))
    rows = islice(matching if only else rows, limit)
    if sample is None:
        return iter(rows)
    instances = [row for row in rows if isinstance(row, Instance)]
    hashes = (hashlib.sha256(f"{seed}/{row.instance_id}".encode()).digest() for row in instances)
    strata: dict[str, list[Instance]] = defaultdict(list)
    for _, row in sorted(zip(hashes, instances, strict=True), key=lambda pair: pair[0]):
        strata[getattr(row, stratify) if stratify else ""].append(row)
    # By where a row stands in its stratum, so that each has its share of any number of them.
    ranks = [((n + 0.5) / len(s), row) for s in strata.values() for n, row in enumerate(s)]
    return (row for _, row in sorted(ranks, key=lambda pair: pair[0])[:sample])


def _raw(source: str) -> Iterator[tuple[str, Any]]:
    path, name = Path(source), ALIASES.get(source, source)
    if source == "-":
        return _json_lines("stdin", sys.stdin.buffer)
    if source.endswith(SUFFIXES):
        return records(path)
    if path.is_dir() and source not in ALIASES:
        return _tasks(path)
    if path.exists() or name.count("/") != 1:
        raise SourceError(
            f"{source}: not a source; give {', '.join(ALIASES)}, an owner/name, a folder of"
            f" tasks, - for stdin, or a file of kind {', '.join(SUFFIXES)}"
        )
    return _hub(name)


def _row(where: str, raw: Any) -> Row:
    instance_id = str(raw.get("instance_id", "")) if isinstance(raw, dict) else ""
    try:
        if isinstance(raw, Exception):
            raise raw
        return raw if isinstance(raw, Instance) else Instance.model_validate(adapt(raw))
    except ValidationError as error:
        fault = error.errors()[0]
        reason = f"column {'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    except BAD_ROW as error:
        reason = str(error) or type(error).__name__
    return Rejected(where, instance_id, " ".join(reason.split())[:500])


def records(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, what) for each record of a file; a line that does not parse is a ValueError."""
    try:
        if path.suffix == ".parquet":
            with _pyarrow().parquet.ParquetFile(path) as table:
                batches = table.iter_batches(batch_size=64)
                rows = (row for batch in batches for row in batch.to_pylist())
                yield from ((f"{path}: row {n}", row) for n, row in enumerate(rows, start=1))
        else:
            with _open(path) as stream:
                yield from _json_lines(str(path), stream)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(f"broken data ({error})".split())
        raise SourceError(f"{path}: {reason}; give a whole, readable file") from error


def _open(path: Path) -> Any:
    if path.suffix == ".zst":
        return io.BufferedReader(_pyarrow().input_stream(str(path), compression="zstd"))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise SourceError("it needs an extra: pip install 'nanoswe-harbor[parquet]'") from error
    return pyarrow


def _json_lines(name: str, stream: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            try:
                yield f"{name}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"{name}:{number}", ValueError(f"not JSON ({error})")


def _hub(name: str) -> Iterator[tuple[str, Any]]:
    """A dataset's test split, or else its train split, streamed; `owner/name@revision` pins it."""
    path, _, revision = name.partition("@")
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]

        splits = datasets.load_dataset(path, revision=revision or None, streaming=True)
        split = "test" if "test" in splits else "train"
        yield from ((f"{name}: {split} row {n}", row) for n, row in enumerate(splits[split]))
    except ImportError as error:
        raise SourceError("a hub name needs an extra: pip install 'nanoswe-harbor[hub]'") from error
    # The library raises its own kinds and those of four HTTP stacks; all mean the same here.
    except Exception as error:
        raise SourceError(f"{name}: not loaded from the hub ({str(error)[:200]})") from error


def _tasks(folder: Path) -> Iterator[tuple[str, Any]]:
    """Rows of task folders: those of ours, and those whose tests/config.json is their row."""
    for path in task_paths(folder):
        config = path / "tests" / "config.json"
        try:
            yield str(path), json.loads(config.read_bytes()) if config.is_file() else _task(path)
        except (HarborError, ValueError, RecursionError) as error:
            yield str(path), ValueError(str(error))


def _task(path: Path) -> Instance:
    """The row that a task of ours was made of."""
    task = load_task(path)
    if not task.base_commit:
        raise ValueError("not a task of ours, and no row in tests/config.json")
    row = {**task.metadata, "workdir": task.workdir, "problem_statement": task.instruction}
    row |= {"FAIL_TO_PASS": task.fail_to_pass, "PASS_TO_PASS": task.pass_to_pass}
    row["patch"] = (path / "solution/gold.patch").read_bytes().decode()
    row["test_patch"] = (path / "tests/test_patch.diff").read_bytes().decode()
    row["bug_patch"] = reverse(row["patch"]) if row["family"] == "swe-smith" else ""
    if (script := path / "tests/eval_script.sh").is_file():
        row["eval_script"] = script.read_bytes().decode()
    instance = Instance.model_validate(row)
    frame = spec_of(instance)[0].frame.format(workdir=task.workdir)
    statement = task.instruction.removeprefix(frame)
    return instance.model_copy(update={"problem_statement": statement})
