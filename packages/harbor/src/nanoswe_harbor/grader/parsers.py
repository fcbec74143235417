# ruff: noqa: UP006, UP035  (this file is copied into images and runs on Python 3.5)
"""Test logs to statuses: `PARSERS[name](text) -> {test id: status}`.

In: what a test runner printed. Out: the last status of each test, one of PASSED, FAILED, ERROR,
SKIPPED, XFAIL (XPASS counts as PASSED). Refuses nothing: lines it does not know are ignored.
Standard library only; written for Python 3.5 and newer.
"""

import re
from typing import Dict

ANSI = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
PYTEST_STATUS = {
    "PASSED": "PASSED",
    "FAILED": "FAILED",
    "ERROR": "ERROR",
    "SKIPPED": "SKIPPED",
    "XFAIL": "XFAIL",
    "XPASS": "PASSED",
}
PYTEST_LINE = re.compile("^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (.+)$")
PYTEST_VERBOSE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: .*)?$")
PATH_OPTION = re.compile(r"\[/(?!/)[^*\]]*/([^/*\]]*)\]$")

UNITTEST_LINE = re.compile(r"^(.+?) \.\.\. (.*)$")
UNITTEST_END = re.compile(r"(?:^|\s)(ok|FAIL|ERROR|skipped.*|expected failure|unexpected success)$")
UNITTEST_NAME = re.compile(r"^\w+ \([\w.]+\)$")
UNITTEST_BANNER = re.compile(r"^(FAIL|ERROR): (\w+ \([\w.]+\)|.+$)")

SYMPY_LINE = re.compile(r"^(test_\w+) (ok|F|E|f|s|X)\b")
SYMPY_BANNER = re.compile(r"^_+ (\S+\.py:test_\w+) _+$")
SYMPY_WORDS = "ok F E f s X".split()
SYMPY_STATUS = dict(zip(SYMPY_WORDS, "PASSED FAILED ERROR XFAIL SKIPPED PASSED".split()))  # noqa: B905


def parse_pytest(text: str) -> Dict[str, str]:
    """The short summary of `pytest -rA`, and the progress lines of `pytest -v`.

    Ids are cut at the first blank, as the published lists are (676 of Verified's end inside `[`).
    """
    statuses = {}  # type: Dict[str, str]
    for line in ANSI.sub("", text).splitlines():
        match = PYTEST_LINE.match(line.strip())
        if match:
            word, rest = match.groups()
        else:
            match = PYTEST_VERBOSE.match(line)
            if not match:
                continue
            rest, word = match.groups()
        statuses[rest.split()[0]] = PYTEST_STATUS[word]
    return statuses


def parse_pytest_options(text: str) -> Dict[str, str]:
    """As parse_pytest; a parameter that is a path keeps its last part, as in published lists."""
    return {PATH_OPTION.sub(r"[/\1]", name): word for name, word in parse_pytest(text).items()}


def parse_unittest(text: str) -> Dict[str, str]:
    """`python -m unittest -v` and Django's runner: `name (module.Class.name) ... ok`.

    A docstring replaces the id at the line's end, so both it and the id above are recorded. Output
    of the test may stand between `...` and the status; then the status closes a later line. A test
    with failing subtests gets no status at all: the next test starts on its line (`a ... b ... ok`
    says nothing about a), and only the banner of a subtest, after all tests, says that it failed.
    """
    statuses = {}  # type: Dict[str, str]
    pending = above = ""
    for line in ANSI.sub("", text).splitlines():
        banner = UNITTEST_BANNER.match(line)
        if banner:
            statuses[banner.group(2)] = "FAILED" if banner.group(1) == "FAIL" else "ERROR"
            continue
        match = UNITTEST_LINE.match(line)
        while match:
            pending, line = match.groups()
            above = "" if UNITTEST_NAME.match(pending) else above
            match = UNITTEST_LINE.match(line)
            match = match if match and UNITTEST_NAME.match(match.group(1)) else None
        if UNITTEST_NAME.match(line):
            pending, above = "", line
            continue
        end = UNITTEST_END.search(line)
        if end and pending:
            for name in filter(None, (pending, above)):
                statuses[name] = _unittest_status(end.group(1))
            pending = above = ""
    return statuses


def _unittest_status(word: str) -> str:
    if word.startswith("skipped"):
        return "SKIPPED"
    return {
        "ok": "PASSED",
        "FAIL": "FAILED",
        "ERROR": "ERROR",
        "expected failure": "XFAIL",
        "unexpected success": "FAILED",
    }[word]


def parse_sympy(text: str) -> Dict[str, str]:
    """sympy's own runner, `bin/test -C --verbose`: `test_x ok`, and failures as banners too."""
    statuses = {}  # type: Dict[str, str]
    for line in ANSI.sub("", text).splitlines():
        match = SYMPY_LINE.match(line)
        if match:
            statuses[match.group(1)] = SYMPY_STATUS[match.group(2)]
        match = SYMPY_BANNER.match(line)
        if match:
            statuses[match.group(1)] = "FAILED"
    return statuses


PARSERS = {
    "pytest": parse_pytest,
    "pytest-options": parse_pytest_options,
    "unittest": parse_unittest,
    "sympy": parse_sympy,
}
