# ruff: noqa: UP006, UP020, UP032, UP035, UP045  (this file is copied into images and runs on Python 3.5)
"""The verdict: `grade(log, expected, exit_code) -> report/1`; also a program, `grade.py LOG`.

In: the log of run_eval.sh, tests/expected.json, and the exit code of run_eval.sh if known. Out: a
report; as a program also exit code 0 (resolved), 1 (not resolved), 2 (could not grade). Only what
stands between the last markers with the right nonce counts; an absent test did not pass; where the
runner writes a result file, what passed has to have passed in it too. For Python 3.5 and newer.
"""

import argparse
import html
import io
import json
import os
import re
import sys
from collections import namedtuple
from typing import Any, Dict, List, Optional, Set, Tuple  # noqa: F401

if __package__:
    from nanoswe_harbor.grader.parsers import PARSERS, SUMMARY, short_name
else:  # a copy in a task's tests/ folder
    from parsers import PARSERS, SUMMARY, short_name  # type: ignore[no-redef]

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
NOT_INSTALLED = "\n>>>>> Install Failed\n"
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
GOOD, EXCUSES = ("PASSED", "XFAIL"), ("XFAIL", "SKIPPED")
NOT_TESTS = ("[100%]", "test_capsysbinary.py::test_hello")  # published, but lines of a log
CASE = re.compile(r' classname="([^"]*)"| name="([^"]*)"')

# What the tests printed, their exit code, why there is nothing, our fault?, the names of the
# canaries (the first one passes), and the runner's own result file, if it writes one.
Section = namedtuple("Section", "text exit_code reason infra canary results")  # noqa: PYI024


def grade(
    log: str,
    expected: Dict[str, Any],
    exit_code: Optional[int] = None,
    nonce: Optional[str] = None,
    official: bool = False,
    before: Optional[Dict[str, str]] = None,
) -> Dict[str, Any]:
    """Judge one log. `expected`: parser, fail_to_pass, pass_to_pass, repaired (ids that were cut).

    `official`: an official harness wrote it. `before`: the status map without the patch.
    """
    if "\r" in log:
        log = log.replace("\r\n", "\n").replace("\r", "\n")
    section = official_section(log) if official else own_section(log, exit_code, nonce)
    status = PARSERS[expected["parser"]](section.text)
    judged, excused, found = _judge(section, status, expected, before)
    report = {
        "schema": "report/1",
        "resolved": False,
        "infra": section.infra,
        "tamper": False,
        "reinstalled": NOT_INSTALLED not in log,
        "reason": section.reason,
        "exit_code": section.exit_code,
        "fail_to_pass": _split(expected["fail_to_pass"], judged, ("PASSED",), ()),
        "pass_to_pass": _split(expected["pass_to_pass"], judged, GOOD, ("SKIPPED",)),
        "excused": excused,
        "status": status,
    }  # type: Dict[str, Any]
    failures = [len(report[key]["failure"]) for key in ("fail_to_pass", "pass_to_pass")]
    if not status:
        report["reason"] = section.reason or "no test result in the log"
    elif failures != [0, 0]:
        report["reason"] = "{} fail-to-pass and {} pass-to-pass tests do not pass".format(*failures)
    else:
        passed = report["fail_to_pass"]["success"] + report["pass_to_pass"]["success"]
        missing = [t for t in passed if judged[t] not in found.get(t, {judged[t]})]
        report["reason"] = _forged(section.canary.split(), status, missing)
        report["tamper"] = bool(report["reason"])
        report["resolved"] = not report["reason"]
    return report


def _judge(section, status, expected, before):
    # type: (Section, Dict[str, str], Dict[str, Any], Any) -> Tuple[Dict[str, str], List[str], Any]
    """Test → its last word, what is excused, and test → its words in the runner's result file."""
    repaired = expected.get("repaired", {})
    judged = dict(status, **_whole(section.text, repaired))
    # As in the official harnesses a test that passed before may be expected to fail, or skip; but
    # where it is known that without the patch it did not, the patch broke it.
    excused = [test for test in expected["pass_to_pass"] if judged.get(test) in EXCUSES]
    broken = {t for t in excused if before is not None and judged[t] != before.get(t)}
    excused = [test for test in excused if test not in broken]
    judged.update(dict.fromkeys(broken, "FAILED"))
    record = _record(section.results or "")
    recorded = () if section.results is None else ("fail_to_pass", "pass_to_pass")
    wanted = [test for key in recorded for test in expected[key] if test not in NOT_TESTS]
    found = {test: _in_record(repaired.get(test, test), test, record) for test in wanted}
    judged.update({test: "FAILED" for test, words in found.items() if "FAILED" in words})
    return judged, excused, found


def own_section(log: str, exit_code: Optional[int], nonce: Optional[str]) -> Section:
    """What stands between the last markers of run_eval.sh; without a nonce, the last end's."""
    end = log.rfind("\n{} {}".format(END, nonce + " " if nonce else ""))
    words = log[end + 1 : end + 200].split("\n", 1)[0].split() if end >= 0 else []
    # The script's own exit code is the one that it told, unless something else ended it.
    if len(words) == 6 and words[5].isdigit() and exit_code in (None, int(words[5])):
        start = "{} {}\n".format(START, words[4])
        at = log.rfind(start, 0, end + 1)
        if at == 0 or (at > 0 and log[at - 1] == "\n"):
            canary = _between("\n" + log[:at], "\n>>>>> Canary {} ".format(words[4]), "\n") or ""
            results = _between(log[end:], "\n>>>>> Results {}\n".format(words[4]), "\n>>>>> End")
            text = log[at + len(start) : end + 1]
            return Section(text, int(words[5]), "", False, canary, results)
    endings = (
        ("\n>>>>> Test Patch Failed\n" in "\n" + log, "the test files could not be restored"),
        (exit_code in TIMEOUT_EXITS, "timeout: the tests were cut off"),
        (START in log, "no end marker: the tests were cut off"),
        (NOT_INSTALLED in log, "the reinstall failed: the tests never began"),
        (True, "no start marker: the tests never began"),
    )
    reason = next(reason for holds, reason in endings if holds)
    return Section("", None, reason, "never began" in reason, "", None)


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
    return Section("" if reason else text, None, reason, "never began" in reason, "", None)


def _between(text: str, opening: str, closing: str) -> Optional[str]:
    """What stands between the last opening and the next closing, if both are there."""
    at = text.rfind(opening)
    end = text.find(closing, at + len(opening) - 1) if at >= 0 else -1
    return text[at + len(opening) : end] if end >= 0 else None


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


def _record(results: str) -> Dict[str, Set[str]]:
    """Id → statuses, by the runner's own result file; of pytest also by ids as logs cut them.

    Its lines are `FAILED id`, or pytest's junit tags <testcase …>, <failure, <error, <skipped.
    """
    cases = []  # type: List[Any]
    for line in results.replace("\nERROR ", "\nFAILED ").split("\n"):
        if line.startswith("<testcase "):
            whole = ".".join(html.unescape(a or b) for a, b in CASE.findall(line))
            cases.append(["PASSED", whole, (whole.split() or [""])[0]])
        elif line.startswith("<") and cases:
            cases[-1][0] = "XFAIL" if line.startswith("<skipped") else "FAILED"
        else:
            cases.append(line.split(" ", 1))
    found = {}  # type: Dict[str, Set[str]]
    for word, *names in cases:
        for name in names:
            found.setdefault(short_name(name.strip()), set()).add(word)
    return found


def _in_record(whole: str, test: str, record: Dict[str, Set[str]]) -> Set[str]:
    """The statuses of a test in a record, by its id or as pytest's junit file names it.

    That is a.b.C.t[x] for a/b.py::C::t[x], or without `a.` where pytest's own root is that folder.
    """
    for name in (short_name(whole), short_name(test)):
        path, bracket, parameter = name.partition("[")
        parts = path.replace(".py::", "::", 1).replace("::", ".").replace("/", ".").split(".")
        dotted = [".".join(parts[n:]) + bracket + parameter for n in range(len(parts) - 1)]
        for known in [name] + dotted:
            if known in record:
                return record[known]
    return set()


def _split(tests, status, credit, neither):
    # type: (List[str], Dict[str, str], Any, Any) -> Dict[str, List[str]]
    words = [(test, status.get(test)) for test in tests]
    failure = [test for test, word in words if word not in credit + neither]
    return {"success": [test for test, word in words if word in credit], "failure": failure}


def _forged(canaries: List[str], status: Dict[str, str], missing: List[str]) -> str:
    """Why nothing of it is believed; "" if it is.

    Of the canaries the first one must pass, and each of the others must fail.
    """
    for canary in canaries:
        name = re.compile(r"(?<!\w)" + re.escape(canary) + r"(?!\w)")
        words = {status[test] for test in status if name.search(test)}
        if canary == canaries[0]:
            right = words == {"PASSED"}
        elif "PASSED" in words:
            return "a test that must fail passes"
        else:
            right = bool(words) and words <= {"FAILED", "ERROR"}
        if not right:
            return "no canary result"
    text = "{} tests that passed are not so in the runner's own result file"
    return text.format(len(missing)) if missing else ""


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
