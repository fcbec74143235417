"""Sources: where Instances come from.

In: `nano`, an alias (verified, swegym), a path (.parquet, .jsonl, .jsonl.gz) or a hub name.
Out: an iterator of Instances, read as it is consumed. Refuses (SourceError, one line: file, line,
remedy) what is missing, empty, truncated, not JSON, not a parquet file, or lacks columns.
"""

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nanoswe_harbor.instance import HarborError, Instance
from nanoswe_harbor.nano import SPLITS, build, cases

ALIASES = {"verified": "princeton-nlp/SWE-bench_Verified", "swegym": "SWE-Gym/SWE-Gym"}
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")


class SourceError(HarborError):
    """A source of rows is missing or holds something that is not an Instance."""


def label(source: str) -> str:
    """What to call a source in output: never a path of this machine."""
    return Path(source).name if source.endswith(SUFFIXES) else ALIASES.get(source, source)


def read_rows(source: str) -> Iterator[Instance]:
    """Every row of a source, in its order."""
    if source == "nano":
        return _nano()
    if source.endswith(SUFFIXES):
        rows = _parquet(Path(source)) if source.endswith(".parquet") else _jsonl(Path(source))
    else:
        name = ALIASES.get(source, source)
        if Path(source).exists() or name.count("/") != 1:
            raise SourceError(
                f"{source}: not a source; give nano, verified, swegym, an owner/name, or a file of"
                f" kind {', '.join(SUFFIXES)}"
            )
        from nanoswe_harbor.hub import hub_rows

        rows = hub_rows(name)
    return _instances(source, rows)


def read_row(source: str, instance_id: str) -> Instance:
    """One row by id. Raises SourceError when the source does not have it."""
    for row in read_rows(source):
        if row.instance_id == instance_id:
            return row
    raise SourceError(f"{source}: no row {instance_id}; check the id")


def _instances(source: str, rows: Iterator[tuple[str, Any]]) -> Iterator[Instance]:
    empty = True
    for where, row in rows:
        empty = False
        try:
            yield Instance.model_validate(row)
        except ValidationError as error:
            raise SourceError(f"{where}: {_explain(error)}; want SWE-bench rows") from error
    if empty:
        raise SourceError(f"{source}: no rows; give a file with at least one")


def _explain(error: ValidationError) -> str:
    faults = error.errors()
    missing = [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]
    if missing:
        return f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
    first = faults[0]
    return f"column {'.'.join(map(str, first['loc'])) or 'row'}: {first['msg']}"


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except (gzip.BadGzipFile, EOFError) as error:
        where = f"{path}:{number + 1}"
        raise SourceError(f"{where}: broken gzip data ({error}); download it again") from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}; give a readable file") from error
    except ValueError as error:
        where = f"{path}:{number}"
        raise SourceError(f"{where}: not JSON ({error}); fix it or download it again") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise SourceError("parquet needs: pip install 'nanoswe-harbor[parquet]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise SourceError(f"{path}: broken parquet ({error}); download it again") from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}; give a readable file") from error


def _nano() -> Iterator[Instance]:
    with tempfile.TemporaryDirectory() as folder:
        for split in SPLITS:
            yield from build(cases(split, 64, 0), Path(folder))
