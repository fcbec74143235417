"""grader: markers, statuses, credit; the same file inside the package and copied into a task."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.grader.parsers import PARSERS

HERE = Path(__file__).resolve().parent
RUNS = HERE.parents[3] / "shared/data/logs/harness_v4_runs.jsonl.gz"
SECTION = re.compile(r"(?s)>>>>> Start Test Output'?\n(.*)\n[^\n]*>>>>> End Test Output")
EXPECTED = {"parser": "pytest", "fail_to_pass": ["t.py::a"], "pass_to_pass": ["t.py::b"]}


def log(body: str, nonce: str = "n", code: int = 0) -> str:
    return f"x\n>>>>> Start Test Output {nonce}\n{body}\n>>>>> End Test Output {nonce} {code}\n"


def test_resolved_needs_every_test() -> None:
    report = grade(log("PASSED t.py::a\nPASSED t.py::b", code=7), EXPECTED)
    assert report["schema"] == "report/1"
    assert report["resolved"] and report["reason"] == "" and report["exit_code"] == 7
    assert report["status"] == {"t.py::a": "PASSED", "t.py::b": "PASSED"}
    report = grade(log("PASSED t.py::a"), EXPECTED)
    assert not report["resolved"] and report["pass_to_pass"]["failure"] == ["t.py::b"]


def test_expected_failures_never_credit_fail_to_pass() -> None:
    assert not grade(log("XFAIL t.py::a\nPASSED t.py::b"), EXPECTED)["resolved"]
    assert grade(log("PASSED t.py::a\nXFAIL t.py::b"), EXPECTED)["resolved"]
    assert not grade(log("PASSED t.py::a\nSKIPPED t.py::b"), EXPECTED)["resolved"]


def test_the_last_pair_with_the_right_nonce_wins() -> None:
    good, bad = "PASSED t.py::a\nPASSED t.py::b", "FAILED t.py::a\nPASSED t.py::b"
    assert not grade(log(good) + log(bad), EXPECTED, nonce="n")["resolved"]
    assert not grade(log(bad) + log(good, "forged"), EXPECTED, nonce="n")["resolved"]
    assert grade(log(bad, "forged") + log(good), EXPECTED, nonce="n")["resolved"]
    inside = log(log(good, "forged") + bad)
    assert not grade(inside, EXPECTED, nonce="n")["resolved"]


def test_cut_logs_say_why() -> None:
    cut = ">>>>> Start Test Output n\nPASSED t.py::a\nPASSED t.py::b\n"
    report = grade(cut, EXPECTED)
    assert (report["resolved"], report["infra"]) == (False, False)
    assert "no end marker" in report["reason"]
    assert "timeout" in grade(cut, EXPECTED, 124)["reason"]
    assert grade("bash: git: command not found\n", EXPECTED, 127)["infra"]
    report = grade(">>>>> Test Patch Failed\n", EXPECTED, 3)
    assert not report["infra"] and "restored" in report["reason"]
    assert grade(log("nothing here"), EXPECTED)["reason"] == "no test result in the log"


def test_unittest_and_django_lines() -> None:
    text = """\
test_a (t.test_x.T.test_a) ... ok
test_b (t.test_x.T) ... FAIL
test_c (t.test_x.T.test_c)
The docstring of c. ... ok
test_d (t.test_x.T.test_d) ... printed by the test
ok
test_e (t.test_x.T.test_e) ... skipped 'no'
test_f (t.test_x.T.test_f) ... expected failure
test_g (t.test_x.T.test_g) ... unexpected success
test_h (t.test_x.T.test_h) ... Testing ok
======================================================================
ERROR: test_h (t.test_x.T.test_h)
"""
    assert PARSERS["unittest"](text) == {
        "test_a (t.test_x.T.test_a)": "PASSED",
        "test_b (t.test_x.T)": "FAILED",
        "test_c (t.test_x.T.test_c)": "PASSED",
        "The docstring of c.": "PASSED",
        "test_d (t.test_x.T.test_d)": "PASSED",
        "test_e (t.test_x.T.test_e)": "SKIPPED",
        "test_f (t.test_x.T.test_f)": "XFAIL",
        "test_g (t.test_x.T.test_g)": "FAILED",
        "test_h (t.test_x.T.test_h)": "ERROR",
    }


def test_a_failing_subtest_is_no_pass() -> None:
    """As Django prints it: no status for the test itself, the next test starts on its line."""
    text = """\
test_a (t.T) ... test_b (t.T) ... ok
test_c (t.T) ... test_d (t.T)
The docstring of d. ... ok
FAIL: test_a (t.T) (lang='de')
ERROR: test_c (t.T) [group]
"""
    assert PARSERS["unittest"](text) == {
        "test_a (t.T)": "FAILED",
        "test_b (t.T)": "PASSED",
        "test_c (t.T)": "ERROR",
        "test_d (t.T)": "PASSED",
        "The docstring of d.": "PASSED",
    }


def test_pytest_and_sympy_lines() -> None:
    text = (
        "PASSED t.py::a[x y]\nFAILED t.py::b - assert 1 == 2\nERROR t.py::c\nt.py::d PASSED [ 9%]\n"
    )
    assert PARSERS["pytest"]("\x1b[32m" + text) == {
        "t.py::a[x": "PASSED",
        "t.py::b": "FAILED",
        "t.py::c": "ERROR",
        "t.py::d": "PASSED",
    }
    text = "PASSED t.py::a[/tmp/long/x.py]\nPASSED t.py::b[//u/v]\n"
    assert list(PARSERS["pytest-options"](text)) == ["t.py::a[/x.py]", "t.py::b[//u/v]"]
    text = "test_a ok\ntest_b F\ntest_c f\n____ sympy/x/test_y.py:test_b ____\n"
    assert PARSERS["sympy"](text) == {
        "test_a": "PASSED",
        "test_b": "FAILED",
        "test_c": "XFAIL",
        "sympy/x/test_y.py:test_b": "FAILED",
    }


def test_the_copy_in_a_task_is_a_program(nano: Path, tmp_path: Path) -> None:
    tests = nano / "train" / "nano__train-0000" / "tests"
    expected = json.loads((tests / "expected.json").read_text())
    ids = expected["fail_to_pass"] + expected["pass_to_pass"]
    path = tmp_path / "eval.log"
    command = [sys.executable, "-S", "-B", str(tests / "grade.py"), str(path)]

    def run(text: str) -> tuple[int, str]:
        path.write_text(text)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    code, report = run(log("\n".join(f"{test} ... ok" for test in ids)))
    assert code == 0 and json.loads(report)["resolved"]
    code, report = run(log("\n".join(f"{test} ... FAIL" for test in ids), code=1))
    assert code == 1 and not json.loads(report)["resolved"]
    assert run("nothing ran")[0] == 2


def test_verdicts_agree_with_the_official_harness() -> None:
    """Over 107 of its real runs where they are at hand, else over the two kept here."""
    path = RUNS if RUNS.is_file() else HERE / "data" / "harness_excerpt.jsonl"
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    judged = 0
    for run in map(json.loads, text.splitlines()):
        status = run["report"].get("tests_status")
        section = SECTION.search(run["test_output"])
        if not status or not section:
            continue
        lists = {key: sum(status[key].values(), []) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
        expected = {
            "parser": "unittest" if run["instance_id"].startswith("django") else "pytest",
            "fail_to_pass": lists["FAIL_TO_PASS"],
            "pass_to_pass": lists["PASS_TO_PASS"],
        }
        report = grade(log(section.group(1)), expected)
        assert report["resolved"] is run["report"]["resolved"], run["instance_id"]
        # The official parser loses a test that shares its line with one whose subtests failed.
        shared = set(re.findall(r"\) \.\.\. (\w+ \([\w.]+\)) \.\.\. ok$", section.group(1), re.M))
        for key in lists:
            ours, theirs = set(report[key.lower()]["success"]), set(status[key]["success"])
            assert theirs <= ours <= theirs | shared, run["instance_id"]
        judged += 1
    assert judged >= 2
