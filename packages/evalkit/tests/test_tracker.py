"""What W&B was told, read back from what it wrote offline: the real library, its own file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.interop
BLOCK, HEADER = 32768, 7


def _records(path: Path) -> list[Any]:
    """The protobuf records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, found = path.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def _told(folder: Path) -> dict[str, Any]:
    """The last value of each key of history and summary, the artifacts, the run's id."""
    (path,) = folder.glob("*.wandb")
    told: dict[str, Any] = {"artifacts": []}
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            told["id"] = record.run.run_id
        if kind == "artifact" and record.artifact.type == "trials":
            files = [entry.path for entry in record.artifact.manifest.contents]
            told["artifacts"].append((record.artifact.name, files))
        items = {"history": record.history.item, "summary": record.summary.update}.get(kind, ())
        for item in items:
            told[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return told


def test_an_evaluation_is_read_back_and_said_again_the_same(nano: Path, tmp_path: Path) -> None:
    text = f"name: gold\ntasks: {{path: {nano / 'heldout'}}}\nagent: {{kind: oracle}}\n"
    (tmp_path / "r.yaml").write_text(text + "eval: {attempts: 2, k: [1, 2], tracker: wandb}\n")
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", "r.yaml"]
    seen = []
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        latest = (tmp_path / "runs/gold/wandb/latest-run").resolve()
        told = _told(latest)
        table = json.loads((latest / "files" / told["trials table/path"]).read_text())
        seen.append((told, table))
        assert (told["id"], told["avg@2"], told["infra_rate"]) == ("gold", 1.0, 0)
        score = told["scores"]["pass@2"]
        assert score["value"] == score["high"] == 1.0 and score["low"] < 0.4
        assert sum(told["turns histogram/values"]) == 4
        assert sum(told["total_sec histogram/values"]) == 4
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert [row["outcome"] for row in rows] == ["resolved"] * 4
        assert {row["trial_id"] for row in rows} == {
            f"nano__heldout-{i:04}.{n}" for i in range(2) for n in range(2)
        }
        assert told["artifacts"] == [("gold-trials", ["trials.jsonl"])]
    assert seen[0][1] == seen[1][1]  # nothing ran again, and the same was said
