"""Line-JSON records of a run: a path, a schema and a reader of one record in, what it reads out.

A file that is absent holds nothing; a torn last line, as a killed run leaves it, is ignored.
Refuses (EvalkitError) what is not JSON, a schema that this version does not know, and what the
reader refuses.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

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
                raise EvalkitError(f"{path}:{number}: not readable ({error})") from error
