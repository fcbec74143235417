# ruff: noqa: UP006, UP020, UP032, UP035, UP045  (this file is copied into images and runs on Python 3.5)
"""The verdict: `grade(log, expected, exit_code) -> report/1`; also a program, `grade.py LOG`.

In: the log of run_eval.sh, tests/expected.json, and the exit code of run_eval.sh if known. Out: a
report; as a program also exit code 0 (resolved), 1 (not resolved), 2 (could not grade). Only what
stands between the last markers with the right nonce counts; an absent test did not pass; a result
file can take credit away, never give it. Standard library only; for Python 3.5 and newer.
"""

import argparse
import html
import io
import json
import os
import re
import sys
from collections import namedtuple
from typing import Any, Dict, List, Optional

if __package__:
    from nanoswe_harbor.grader.parsers import PARSERS, SUMMARY
else:  # a copy in a task's tests/ folder
    from parsers import PARSERS, SUMMARY  # type: ignore[no-redef]

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
# What the official scripts trace or print before the tests, where they print no start marker.
OLD_START = re.compile(
    r"\n>>>>> Applied Patch \(pred\)(?=\n)|\n\+ .*\b(?:pytest|tox|runtests\.py|bin/test)\b"
)
REFUSALS = {
    ">>>>> Patch Apply Failed": "the patch does not apply",
    ">>>>> Reset Failed": "the test files could not be restored",
    ">>>>> Tests Errored": "the tests could not be run",
    ">>>>> Tests Timed Out": "timeout: the tests were cut off",
}
TIMEOUT_EXITS = (124, 137)
GOOD = ("PASSED", "XFAIL")
CASE = re.compile(r' classname="([^"]*)"| name="([^"]*)"')

# What the tests printed, their exit code, why there is nothing, our fault?, the name of the canary,
# and the runner's own result file.
Section = namedtuple("Section", "text exit_code reason infra canary results")  # noqa: PYI024


def grade(
    log: str,
    expected: Dict[str, Any],
    exit_code: Optional[int] = None,
    nonce: Optional[str] = None,
    official: bool = False,
) -> Dict[str, Any]:
    """Judge one log. `expected`: parser, fail_to_pass, pass_to_pass, repaired (ids that were cut).

    `official`: an official harness wrote it.
    """
    if "\r" in log:
        log = log.replace("\r\n", "\n").replace("\r", "\n")
    section = official_section(log) if official else own_section(log, exit_code, nonce)
    status = PARSERS[expected["parser"]](section.text)
    judged = dict(status, **_whole(section.text, expected.get("repaired", {})))
    failed = _failed_results(section.results)
    report = {
        "schema": "report/1",
        "resolved": False,
        "infra": section.infra,
        "tamper": False,
        "reason": section.reason,
        "exit_code": section.exit_code,
        "fail_to_pass": _split(expected["fail_to_pass"], judged, failed, ("PASSED",), ()),
        # As the official harnesses do: a test that passed before may be expected to fail, or skip.
        "pass_to_pass": _split(expected["pass_to_pass"], judged, failed, GOOD, ("SKIPPED",)),
        "status": status,
    }  # type: Dict[str, Any]
    failures = [len(report[key]["failure"]) for key in ("fail_to_pass", "pass_to_pass")]
    if section.reason:
        return report
    report["resolved"] = failures == [0, 0]
    if not status:
        report["reason"] = "no test result in the log"
    elif not report["resolved"]:
        report["reason"] = "{} fail-to-pass and {} pass-to-pass tests do not pass".format(*failures)
    elif section.canary:
        _heed_canary(section.canary, status, report)
    return report


def own_section(log: str, exit_code: Optional[int], nonce: Optional[str]) -> Section:
    """What stands between the last markers of run_eval.sh; without a nonce, the last end's."""
    end = log.rfind("\n{} {}".format(END, nonce + " " if nonce else ""))
    words = log[end + 1 : end + 200].split("\n", 1)[0].split() if end >= 0 else []
    if len(words) == 6 and words[5].isdigit():
        start = "{} {}\n".format(START, words[4])
        at = log.rfind(start, 0, end + 1)
        if at == 0 or (at > 0 and log[at - 1] == "\n"):
            canary = _between("\n" + log[:at], "\n>>>>> Canary {} ".format(words[4]), "\n")
            results = _between(log[end:], "\n>>>>> Results {}\n".format(words[4]), "\n>>>>> End")
            text = log[at + len(start) : end + 1]
            return Section(text, int(words[5]), "", False, canary, results)
    if "\n>>>>> Test Patch Failed\n" in "\n" + log:
        reason, infra = "the test files could not be restored", False
    elif exit_code in TIMEOUT_EXITS:
        reason, infra = "timeout: the tests were cut off", False
    elif START in log:
        reason, infra = "no end marker: the tests were cut off", False
    else:
        reason, infra = "no start marker: the tests never began", True
    return Section("", None, reason, infra, "", "")


def official_section(log: str) -> Section:
    """The same of a log that a SWE-bench or SWE-Gym harness wrote, markers without a nonce."""
    reasons = [reason for marker, reason in REFUSALS.items() if marker in log]
    end = log.rfind(END)
    if START in log and end >= 0:
        start = log.rfind(START, 0, end)
        text = log[start + len(START) : end]
        reasons += ["no start marker: the tests never began"] if start < 0 else []
    else:
        begins = [match.end() - 1 for match in OLD_START.finditer("\n" + log)]
        text = log[begins[-1] :] if begins else ""
        reasons += ["no end marker: the tests were cut off"] if START in log else []
        reasons += [] if begins else ["no start marker: the tests never began"]
    reason = reasons[0] if reasons else ""
    return Section("" if reason else text, None, reason, "never began" in reason, "", "")


def _between(text: str, opening: str, closing: str) -> str:
    """What stands between the last opening and the next closing; "" without one of them."""
    at = text.rfind(opening)
    end = text.find(closing, at + len(opening)) if at >= 0 else -1
    return text[at + len(opening) : end] if end >= 0 else ""


def _whole(text: str, repaired: Dict[str, str]) -> Dict[str, str]:
    """Published id → status, for published ids that are cut: of the whole id, if the log has it."""
    published = {whole: cut for cut, whole in repaired.items()}
    found = {}  # type: Dict[str, str]
    for line in SUMMARY.findall("\n" + text) if repaired else ():
        word, _, name = line.partition(" ")
        name = name if name in published else name.partition(" - ")[0]
        if name in published:
            found[published[name]] = word
    return found


def _failed_results(results: str) -> List[str]:
    """The ids, cut as in logs, that the runner's own result file says failed.

    Its lines are `FAILED id`, or pytest's junit tags <testcase …>, <failure, <error.
    """
    failed, case = set(), ""
    for line in results.split("\n"):
        if line.startswith("<testcase "):
            parts = [html.unescape(a or b) for a, b in CASE.findall(line)]
            case = (".".join(parts).split() or [""])[0]
        elif line in ("<failure", "<error"):
            failed.add(case)
        elif line.startswith(("FAILED ", "ERROR ")):
            failed.add(line.partition(" ")[2])
    return sorted(failed)


def _dotted(test: str) -> str:
    """A pytest id as its junit class and name: a/b.py::C::t[x] is a.b.C.t[x]."""
    path, bracket, parameter = test.partition("[")
    path = path.replace(".py::", "::", 1).replace("::", ".").replace("/", ".")
    return path + bracket + parameter


def _split(tests, status, failed, credit, neither):
    # type: (List[str], Dict[str, str], List[str], Any, Any) -> Dict[str, List[str]]
    bad = set(failed)
    success, failure = [], []  # type: List[str], List[str]
    for test in tests:
        word = status.get(test)
        if word in credit and not (bad and (test in bad or _dotted(test) in bad)):
            success.append(test)
        elif word not in neither:
            failure.append(test)
    return {"success": success, "failure": failure}


def _heed_canary(canary: str, status: Dict[str, str], report: Dict[str, Any]) -> None:
    """Passes are forged where a test that must fail passes too, or either canary was not run."""
    passes = {status[test] for test in status if "test_{}_passes".format(canary) in test}
    fails = {status[test] for test in status if "test_{}_fails".format(canary) in test}
    if passes == {"PASSED"} and fails and fails <= {"FAILED", "ERROR"}:
        return
    report["resolved"], report["tamper"] = False, True
    report["reason"] = "a test that must fail passes" if "PASSED" in fails else "no canary result"


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
