"""The command line as a user runs it: output, exit codes, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXCERPT = str(Path(__file__).parent / "data" / "verified_excerpt.jsonl")


def run(*arguments: str, cwd: Path | None = None) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "nanoswe_harbor", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_convert_verify_show_grade(tmp_path: Path) -> None:
    arguments = ("convert", "nano", "--out", "tasks/nano", "--train", "2", "--heldout", "1")
    assert run(*arguments, cwd=tmp_path)[:2] == (0, "3 tasks in tasks/nano\n")
    assert sorted(p.name for p in (tmp_path / "tasks/nano").iterdir()) == [
        "heldout",
        "mirror",
        "train",
    ]
    assert run("verify-format", "tasks/nano", cwd=tmp_path)[:2] == (0, "3 of 3 tasks are whole\n")
    task = "tasks/nano/train/nano__train-0001"
    code, shown, _ = run("show", task, "--json", cwd=tmp_path)
    fields = json.loads(shown)
    assert code == 0 and fields["task_id"] == "nano__train-0001"
    lines = [f"{test} ... ok" for test in fields["fail_to_pass"] + fields["pass_to_pass"]]
    (tmp_path / "eval.log").write_text(
        "\n".join([">>>>> Start Test Output 1", *lines, ">>>>> End Test Output 1 0", ""])
    )
    assert run("grade", "eval.log", task, cwd=tmp_path)[:2] == (0, "nano__train-0001: resolved\n")
    (tmp_path / task / "tests/expected.json").unlink()
    code, out, _ = run("verify-format", "tasks/nano", cwd=tmp_path)
    assert code == 1 and "nano__train-0001" in out and "expected.json: missing" in out


def test_show_a_row() -> None:
    code, out, _ = run(
        "show", EXCERPT, json.loads(Path(EXCERPT).read_text().splitlines()[0])["instance_id"]
    )
    assert code == 0 and out.startswith("instance_id:")


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "missing.jsonl", "--out", "x"),
        ("convert", "no-such-source", "--out", "x"),
        ("convert", "nano"),
        ("convert", "nano", "--out", "x", "--train", "0"),
        ("convert", EXCERPT, "--out", "/proc/x"),
        ("show", "nowhere"),
        ("show", EXCERPT, "no__row-1"),
        ("verify-format", "nowhere"),
        ("grade", "missing.log", "nowhere"),
        ("frobnicate",),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
