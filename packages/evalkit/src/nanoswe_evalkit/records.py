"""Line-JSON records of a run: a path, a schema and a reader of one record in, what it reads out.

A file that is absent holds nothing; a torn last line, as a killed run leaves it, is ignored, and
cut off before anything is appended. Refuses (EvalkitError) what is not JSON, a schema that this
version does not know, what the reader refuses, and to append beside another process.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from nanoswe_evalkit.outcome import EvalkitError

T = TypeVar("T")


def read_jsonl(path: Path, schema: str, read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or record.get("schema") != schema:
                    raise ValueError(f"not of schema {schema}; read it with what wrote it")
                yield read(record)
            except (ValueError, LookupError, TypeError) as error:
                raise EvalkitError(
                    f"{path}:{number}: not readable ({error}); remove that line"
                ) from error


@contextmanager
def appending(path: Path) -> Iterator[IO[str]]:
    """The file, locked, with whole lines only."""
    with path.open("a", encoding="utf-8") as file, alone(file.fileno(), path):
        file.truncate(_whole(path))
        yield file


@contextmanager
def alone(descriptor: int, path: Path) -> Iterator[None]:
    """Until it is closed no other process gets this file or folder; a killed one lets it go."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        text = f"{path}: another run is writing it; wait, or choose a name"
        raise EvalkitError(text) from error
    yield


def _whole(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) in (b"", b"\n"):
            return size
    return path.read_bytes().rfind(b"\n") + 1
