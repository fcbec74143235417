# ruff: noqa: UP006, UP020, UP032, UP035, UP045  (this file is copied into images and runs on Python 3.5)
"""The verdict: `grade(log, expected, exit_code) -> report/1`; also a program, `grade.py LOG`.

In: the log of run_eval.sh, tests/expected.json, and the exit code of run_eval.sh if known. Out: a
report; as a program also exit code 0 (resolved), 1 (not resolved), 2 (could not grade). Only what
stands between the last pair of markers with the right nonce counts; an absent test did not pass.
Standard library only; written for Python 3.5 and newer.
"""

import argparse
import io
import json
import os
import re
import sys
from typing import Any, Dict, List, Optional, Tuple

if __package__:
    from nanoswe_harbor.grader.parsers import PARSERS
else:  # a copy in a task's tests/ folder
    from parsers import PARSERS  # type: ignore[no-redef]

END = re.compile(r"^>>>>> End Test Output (\w+) (\d+)$", re.MULTILINE)
PATCH_FAILED = re.compile(r"^>>>>> Test Patch Failed$", re.MULTILINE)
TIMEOUT_EXITS = (124, 137)


def grade(
    log: str, expected: Dict[str, Any], exit_code: Optional[int] = None, nonce: Optional[str] = None
) -> Dict[str, Any]:
    """Judge one log. `expected`: parser, fail_to_pass, pass_to_pass. No nonce: any pair."""
    section, test_exit, reason, infra = _section(log, exit_code, nonce)
    status = PARSERS[expected["parser"]](section)
    report = {
        "schema": "report/1",
        "resolved": False,
        "infra": infra,
        "reason": reason,
        "exit_code": test_exit,
        "fail_to_pass": _split(expected["fail_to_pass"], status, ("PASSED",)),
        # As the official harness does: an expected failure keeps a test that passed before.
        "pass_to_pass": _split(expected["pass_to_pass"], status, ("PASSED", "XFAIL")),
        "status": status,
    }  # type: Dict[str, Any]
    if reason:
        return report
    failures = len(report["fail_to_pass"]["failure"]), len(report["pass_to_pass"]["failure"])
    report["resolved"] = failures == (0, 0)
    if not status:
        report["reason"] = "no test result in the log"
    elif not report["resolved"]:
        report["reason"] = "{} fail-to-pass and {} pass-to-pass tests do not pass".format(*failures)
    return report


def _section(
    log: str, exit_code: Optional[int], nonce: Optional[str]
) -> Tuple[str, Optional[int], str, bool]:
    """(text between the markers, test command's exit code, why it is unusable, our fault?)"""
    log = log.replace("\r\n", "\n")
    ends = [m for m in END.finditer(log) if nonce is None or m.group(1) == nonce]
    for end in reversed(ends):
        start = ">>>>> Start Test Output {}\n".format(end.group(1))
        at = log.rfind(start, 0, end.start())
        if at >= 0:
            return log[at + len(start) : end.start()], int(end.group(2)), "", False
    if PATCH_FAILED.search(log):
        return "", None, "the test files could not be restored", False
    if exit_code in TIMEOUT_EXITS:
        return "", None, "timeout: the tests were cut off", False
    if ">>>>> Start Test Output" in log:
        return "", None, "no end marker: the tests were cut off", False
    return "", None, "no start marker: the tests never began", True


def _split(
    tests: List[str], status: Dict[str, str], credit: Tuple[str, ...]
) -> Dict[str, List[str]]:
    success = [test for test in tests if status.get(test) in credit]
    failure = [test for test in tests if status.get(test) not in credit]
    return {"success": success, "failure": failure}


def main(argv: Optional[List[str]] = None) -> int:
    """Print the report of a log as JSON."""
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="grade the log of run_eval.sh")
    parser.add_argument("log")
    parser.add_argument("expected", nargs="?", default=os.path.join(here, "expected.json"))
    parser.add_argument("--nonce")
    parser.add_argument("--exit-code", type=int)
    options = parser.parse_args(argv)
    try:
        with io.open(options.log, encoding="utf-8", errors="replace") as stream:
            log = stream.read()
        with io.open(options.expected, encoding="utf-8") as stream:
            expected = json.load(stream)
        report = grade(log, expected, options.exit_code, options.nonce)
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write("error: cannot grade: {}\n".format(error))
        return 2
    sys.stdout.write(json.dumps(report, indent=1, sort_keys=True) + "\n")
    return 2 if report["infra"] else 0 if report["resolved"] else 1


if __name__ == "__main__":
    sys.exit(main())
