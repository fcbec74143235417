"""sources: every kind of file, and every kind of broken file as one line with a remedy."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from nanoswe_harbor.instance import HarborError
from nanoswe_harbor.sources import SourceError, read_row, read_rows

EXCERPT = Path(__file__).parent / "data" / "verified_excerpt.jsonl"
LINES = EXCERPT.read_text().splitlines()


def test_three_formats_hold_the_same_rows(tmp_path: Path) -> None:
    packed, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet"
    packed.write_bytes(gzip.compress(EXCERPT.read_bytes()))
    rows = [json.loads(line) for line in LINES]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    wanted = list(read_rows(str(EXCERPT)))
    assert len(wanted) == 3
    assert wanted == list(read_rows(str(packed))) == list(read_rows(str(table)))
    assert wanted[0].fail_to_pass == tuple(json.loads(rows[0]["FAIL_TO_PASS"]))
    assert read_row(str(EXCERPT), wanted[2].instance_id) == wanted[2]


def test_lists_may_be_lists_and_optional_columns_absent(tmp_path: Path) -> None:
    row = json.loads(LINES[0])
    row["FAIL_TO_PASS"] = json.loads(row["FAIL_TO_PASS"])
    row["hints_text"] = None
    del row["difficulty"]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (instance,) = read_rows(str(path))
    assert instance.hints_text == instance.difficulty == ""
    assert instance.fail_to_pass == tuple(row["FAIL_TO_PASS"])


def broken(tmp_path: Path, name: str, content: bytes) -> str:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SourceError) as caught:
        list(read_rows(str(path)))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def without(column: str) -> bytes:
    row = json.loads(LINES[1])
    del row[column]
    return f"{LINES[0]}\n{json.dumps(row)}\n".encode()


def test_broken_files(tmp_path: Path) -> None:
    whole = EXCERPT.read_bytes()
    empty = tmp_path / "a.jsonl"
    empty.write_bytes(b"")
    assert list(read_rows(str(empty))) == []
    assert ":2: not JSON" in broken(tmp_path, "b.jsonl", LINES[0].encode() + b"\n{oops\n")
    assert ":3: not JSON" in broken(tmp_path, "c.jsonl", whole[:-100])
    assert ":2: no patch, which swe-bench" in broken(tmp_path, "d.jsonl", without("patch"))
    assert ":2: no FAIL_TO_PASS" in broken(tmp_path, "e.jsonl", without("FAIL_TO_PASS"))
    assert ":1: a row is a mapping" in broken(tmp_path, "f.jsonl", b"[1, 2]\n")
    assert "end-of-stream" in broken(tmp_path, "g.jsonl.gz", gzip.compress(whole)[:-200])
    assert "Not a gzipped file" in broken(tmp_path, "h.jsonl.gz", b"not gzip")
    assert "broken data" in broken(tmp_path, "i.parquet", b"PAR1 not really PAR1")
    assert "broken data" in broken(tmp_path, "j.parquet", b"")


def test_an_id_cannot_leave_the_folder(tmp_path: Path) -> None:
    row = json.loads(LINES[0]) | {"instance_id": "../evil"}
    assert "column instance_id" in broken(tmp_path, "k.jsonl", json.dumps(row).encode())


@pytest.mark.parametrize("source", ["/none/rows.jsonl", "/none/rows.parquet", "rows", "rows.csv"])
def test_missing_sources(source: str) -> None:
    with pytest.raises(HarborError, match="give"):
        list(read_rows(source))
