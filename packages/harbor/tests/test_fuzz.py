"""Wrong rows: named and rejected, or handled; no traceback, nothing half-written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoswe_harbor.convert import convert, task_files
from nanoswe_harbor.instance import HarborError, Instance
from nanoswe_harbor.patches import changes, clean
from nanoswe_harbor.promises import format_faults
from nanoswe_harbor.sources import Rejected, _row, scan

HERE = Path(__file__).resolve().parent
LINES = [*(HERE / "data/families.jsonl").read_text().splitlines()]
LINES += (HERE / "data/verified_excerpt.jsonl").read_text().splitlines()
ROWS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
GOOD = ROWS[-1]
WRONG = [
    None,
    5,
    -1.5,
    True,
    "",
    "x",
    "\x00",
    "\ud800",
    [],
    ["x", None],
    {},
    {"a": [1]},
    "[" * 2000,
]
PATCH = GOOD["patch"]


def outcome(row: Any) -> str:
    """What becomes of a row: "task", or the reason why not; anything else is an error."""
    found = _row("rows:1", row)
    try:
        if isinstance(found, Instance):
            task_files(found, "rows")
            return "task"
        reason = found.reason
    except HarborError as error:
        reason = str(error)
    assert reason and "\n" not in reason
    return reason


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.get("instance_id"))[:30])
def test_any_column_missing_null_or_of_the_wrong_type(row: dict[str, Any]) -> None:
    assert outcome(row) == "task"
    for column in row:
        outcome({key: value for key, value in row.items() if key != column})
        for wrong in WRONG:
            outcome({**row, column: wrong})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ROWS), st.data(), JSON)
def test_any_value_anywhere(row: dict[str, Any], data: st.DataObject, value: Any) -> None:
    outcome(value)
    outcome({**row, data.draw(st.sampled_from(sorted(row))): value})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_patch_that_is_taken_is_one_for_git(data: st.DataObject) -> None:
    """Mutations of a real patch: what `clean` lets pass git parses too, with the same files."""
    text = data.draw(st.sampled_from([PATCH, GOOD["test_patch"]]))
    for _ in range(data.draw(st.integers(1, 3))):
        lines = text.splitlines(keepends=True) or [""]
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.sampled_from(["drop", "twice", "cut", "crlf", "letter"])):
            case "drop":
                del lines[at]
            case "twice":
                lines.insert(at, lines[at])
            case "cut":
                lines = ["".join(lines)[: data.draw(st.integers(0, len(text)))]]
            case "crlf":
                lines = [line.rstrip("\n") + "\r\n" for line in lines]
            case _:
                lines[at] = data.draw(st.sampled_from("+- @\\dx\n")) + lines[at][1:]
        text = "".join(lines)
    try:
        taken = clean(text)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    done = subprocess.run(
        ["git", "apply", "--numstat", "-"], input=taken.encode(), capture_output=True, check=False
    )
    if done.returncode == 0:
        files = {line.split("\t")[2] for line in done.stdout.decode().splitlines()}
        assert files <= {name for names in changes(taken) for name in names}


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../x", "a/../../x", ".git/config", "a/.GIT/hooks/x", '"a/\\056\\056/x"'],
)
@pytest.mark.parametrize("column", ["patch", "test_patch"])
def test_a_path_that_escapes(path: str, column: str) -> None:
    side = path.replace('"', '"b/', 1) if path.startswith('"') else f"b/{path}"
    name = path if path.startswith("/") else side
    patch = f"diff --git {side} {side}\n--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n"
    assert "leaves the repository" in outcome({**GOOD, column: patch})


def test_binary_hunks_arrive_whole(tmp_path: Path) -> None:
    def git(*argv: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        done = subprocess.run(["git", *who, *argv], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode()

    git("init", "-q")
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 20)
    git("add", "-A")
    git("commit", "-q", "-m", "x")
    (tmp_path / "a.bin").write_bytes(bytes(range(255, -1, -1)) * 30)
    patch = git("diff", "--binary")
    row = Instance.model_validate({**GOOD, "patch": patch})
    gold = task_files(row, "rows")["solution/gold.patch"]
    git("checkout", "-q", ".")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=gold, check=True)
    assert git("diff", "--binary") == patch
    assert "binary file without its data" in outcome({**GOOD, "patch": git("diff")})


@pytest.mark.parametrize("column", ["problem_statement", "test_patch", "hints_text", "version"])
def test_fifty_megabytes_of_text(column: str) -> None:
    assert f"column {column}" in outcome({**GOOD, column: "x" * 50_000_000})


def test_a_file_of_bad_rows_and_one_good(tmp_path: Path) -> None:
    bad: list[Any] = [{**GOOD, column: None} for column in GOOD if column != "hints_text"]
    bad += [{**GOOD, "patch": PATCH[:-40]}, {**GOOD, "instance_id": "../../x"}, [], 5, "x"]
    lines = [json.dumps(row) for row in bad] + ["{", "\x00", json.dumps(GOOD)[:-1]]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, json.dumps(GOOD)]) + "\n")
    command = [sys.executable, "-m", "nanoswe_harbor", "convert", "rows.jsonl", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = map(json.loads, (tmp_path / "out/rejected.jsonl").read_text().splitlines())
    # Optional columns may be null; of equal ids only the first row is taken.
    reasons = [entry["reason"] for entry in found]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len(reasons) == len(lines) and all(reasons)
    assert format_faults(tmp_path / "out") == (1, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(len(ROWS))), st.integers(1, 4))
def test_order_and_threads_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], jobs: int
) -> None:
    """Deterministic: the same digests; idempotent: a second run changes nothing."""
    folder = tmp_path_factory.mktemp("order")
    rows = [_row("rows", ROWS[index]) for index in order]
    rows = [row for row in rows if isinstance(row, Instance)]
    unique = len({row.instance_id for row in rows})
    tasks, unchanged, rejected = convert(rows, folder / "out", "rows", jobs=jobs)
    assert (tasks, unchanged, len(rejected)) == (unique, 0, len(rows) - unique)
    text = (folder / "out/dataset.toml").read_text()
    assert convert(rows, folder / "out", "rows", jobs=jobs)[:2] == (unique, unique)
    assert (folder / "out/dataset.toml").read_text() == text == SEEN.setdefault("toml", text)
    assert not [row for row in scan(str(folder / "out")) if isinstance(row, Rejected)]


SEEN: dict[str, str] = {}
