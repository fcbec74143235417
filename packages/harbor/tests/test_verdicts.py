"""`grade --rows`: recorded logs by the rows of a dataset, in the words of the official report."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
RUNS = [json.loads(x) for x in (HERE / "data/harness_excerpt.jsonl").read_text().splitlines()]
CHANGE = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "nanoswe_harbor", "grade", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """rows.jsonl with the expectations of the two recorded runs, and logs.jsonl with their logs."""
    rows = []
    for record in RUNS:
        status = record["report"]["tests_status"]
        lists = {key: sum(status[key].values(), []) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        row = {
            "instance_id": record["instance_id"],
            "repo": "django/django",
            "base_commit": "0" * 40,
            "version": "3.1",
            "patch": CHANGE,
            "test_patch": CHANGE,
            "problem_statement": "It fails.",
            **lists,
        }
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    logs = [{key: record[key] for key in ("instance_id", "test_output")} for record in RUNS]
    (tmp_path / "logs.jsonl").write_text("".join(json.dumps(log) + "\n" for log in logs))
    return tmp_path


def agrees(verdict: dict[str, Any], record: dict[str, Any]) -> bool:
    status = record["report"]["tests_status"]
    return verdict["instance_id"] == record["instance_id"] and all(
        verdict["tests_status"][key] == status[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")
    )


def test_many_logs_and_one(folder: Path) -> None:
    resolved = [record["report"]["resolved"] for record in RUNS]
    code, out, err = run("--rows", "rows.jsonl", "--logs", "logs.jsonl", "--json", cwd=folder)
    verdicts = [json.loads(line) for line in out.splitlines()]
    assert [verdict["resolved"] for verdict in verdicts] == resolved
    assert all(agrees(*pair) for pair in zip(verdicts, RUNS, strict=True))
    assert {v["outcome"] for v in verdicts} <= {"resolved", "unresolved"}
    assert code == (0 if all(resolved) else 1) and f"{sum(resolved)} of 2 resolved" in err
    (folder / "logs.jsonl.gz").write_bytes(gzip.compress((folder / "logs.jsonl").read_bytes()))
    assert run("--rows", "rows.jsonl", "--logs", "logs.jsonl.gz", "--json", cwd=folder)[1] == out
    for record, verdict in zip(RUNS, verdicts, strict=True):
        (folder / "one.log").write_text(record["test_output"])
        arguments = ("--instance", record["instance_id"], "--log", "one.log", "--json")
        code, out, _ = run("--rows", "rows.jsonl", *arguments, cwd=folder)
        assert json.loads(out) == verdict and code == (0 if verdict["resolved"] else 1)


def test_a_bad_line_is_named_and_stops_nothing(folder: Path) -> None:
    good = (folder / "logs.jsonl").read_text().splitlines()[0]
    lines = [
        "{",
        "[1]",
        '{"instance_id": "x"}',
        '{"instance_id": "no__row-1", "test_output": ""}',
        '{"instance_id": 1, "test_output": null}',
        "[" * 100_000,
        "\x00\xff",
        good,
    ]
    (folder / "bad.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    code, out, err = run("--rows", "rows.jsonl", "--logs", "bad.jsonl", "--json", cwd=folder)
    verdicts = [json.loads(line) for line in out.splitlines()]
    assert code == 1 and "Traceback" not in err
    assert [v["outcome"] for v in verdicts[:7]] == ["grader_error"] * 7
    assert all(f"bad.jsonl:{n}: " in v["reason"] for n, v in enumerate(verdicts[:7], start=1))
    assert agrees(verdicts[7], RUNS[0])


def test_a_log_that_says_why(folder: Path) -> None:
    name = RUNS[0]["instance_id"]
    for text, outcome in {
        ">>>>> Patch Apply Failed:\n": "patch_rejected",
        ">>>>> Start Test Output\n>>>>> Tests Timed Out\n": "unresolved",
        "": "grader_error",
        ">>>>> Start Test Output": "unresolved",
    }.items():
        (folder / "one.log").write_text(text)
        arguments = ("--rows", "rows.jsonl", "--instance", name, "--log", "one.log")
        code, out, _ = run(*arguments, cwd=folder)
        assert (code, out.split()[1]) == (1, outcome)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--rows", "rows.jsonl"),
        ("--rows", "rows.jsonl", "--instance", "x"),
        ("--logs", "logs.jsonl"),
        ("a", "b", "--rows", "rows.jsonl"),
        ("--rows", "none.jsonl", "--logs", "logs.jsonl"),
        ("--rows", "rows.jsonl", "--logs", "none.jsonl"),
        ("--rows", "rows.jsonl", "--logs", "."),
        ("--rows", "rows.jsonl", "--logs", "cut.gz"),
        ("--rows", "rows.jsonl", "--instance", "no__row-1", "--log", "logs.jsonl"),
        ("--rows", "rows.jsonl", "--instance", RUNS[0]["instance_id"], "--log", "none.log"),
    ],
)
def test_what_cannot_run_is_one_line(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "cut.gz").write_bytes(gzip.compress(b"{}" * 1000)[:20])
    code, out, err = run(*arguments, cwd=folder)
    assert (code, out) == (2, "") and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ")
