"""Line-JSON records of a run: a path and a schema in, dicts out.

A file that is absent holds nothing; a torn last line, as a killed run leaves it, is ignored.
Refuses (EvalkitError) a line that is not JSON and a schema that this version does not know.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoswe_evalkit.outcome import EvalkitError


def read_jsonl(path: Path, schema: str) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise EvalkitError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(record, dict) or record.get("schema") != schema:
                text = f"not of schema {schema}; read it with the version that wrote it"
                raise EvalkitError(f"{path}:{number}: {text}")
            yield record
