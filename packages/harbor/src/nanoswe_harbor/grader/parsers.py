# ruff: noqa: UP006, UP032, UP035  (this file is copied into images and runs on Python 3.5)
"""Test logs to statuses: `PARSERS[name](text) -> {test id: status}`, as the official harnesses do.

In: what a test runner printed. Out: the last word on each test, mostly one of STATUSES (the
official readers of old pytest logs take any second word). Refuses nothing: other lines are ignored,
and no line costs more than its length. Ids are cut at the first blank, as the published lists are.
Standard library only; written for Python 3.5 and newer.
"""

import re
from functools import partial
from typing import Callable, Dict, Iterable, List, Tuple  # noqa: F401

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")
SUMMARY = re.compile("\n((?:FAILED|PASSED|SKIPPED|ERROR|XFAIL).*)")
COLOR = re.compile(r"\[\d+m")
CONTROL = bytes(code for code in range(1, 32) if code != 10)
NOTE = re.compile(r"FAILED\s*\[[^\]]*\]")
DJANGO_OK = (" ... ok", " ... OK", " ...  OK")
DJANGO_WORDS = ((" ... FAIL", "FAIL:", "FAILED"), (" ... ERROR", "ERROR:", "ERROR"))
VERSION_TEST = "--version is equivalent to version"
TESTING = " ... Testing against Django installed in "


def parse_pytest(text: str) -> Dict[str, str]:
    """The short summary of `pytest -rA`: `PASSED id`, `FAILED id - message`."""
    return dict(_summary(text))


def parse_pytest_options(text: str) -> Dict[str, str]:
    """As parse_pytest; a parameter that is an absolute path keeps its last part."""
    return dict((_short_option(name), word) for name, word in _summary(text))


def parse_pytest_colored(text: str, noted: bool = False) -> Dict[str, str]:
    """As parse_pytest without colours, and `id STATUS` lines of `pytest -v` that end there.

    `noted`: a note in brackets may follow FAILED (pydantic).
    """
    # UTF-8 has these bytes for these characters alone, and deleting bytes is fast.
    plain = COLOR.sub("", text).encode("utf-8", "surrogatepass").translate(None, CONTROL)
    text = plain.decode("utf-8", "surrogatepass")
    statuses = {}  # type: Dict[str, str]
    for line in text.split("\n"):
        if noted and "FAILED" in line:
            end = line.rfind("]") + 1  # beyond it nothing can match, and trying would not be linear
            line = NOTE.sub("FAILED", line[:end]) + line[end:]
        if line.startswith(STATUSES):
            words = _words(line)[1::-1]
        elif line.endswith(STATUSES):
            words = line.split(None, 2)
        else:
            continue
        if len(words) > 1:
            statuses[words[0]] = words[1]
    return statuses


def parse_pytest_progress(text: str) -> Dict[str, str]:
    """`id STATUS [ 9%]`, the progress lines of `pytest -v` (SWE-smith)."""
    statuses = {}  # type: Dict[str, str]
    for line in text.split("\n"):
        words = line.split(None, 2)
        if len(words) > 1 and words[1].startswith(STATUSES) and not line[0].isspace():
            statuses[words[0]] = next(word for word in STATUSES if words[1].startswith(word))
    return statuses


def parse_matplotlib(text: str) -> Dict[str, str]:
    """As parse_pytest; an enum member in an id is its number, whatever the Python."""
    return parse_pytest(_numbered(text))


def parse_seaborn(text: str) -> Dict[str, str]:
    """`FAILED id`, `PASSED id` and `id PASSED …`; nothing else."""
    statuses = {}  # type: Dict[str, str]
    for line in text.split("\n"):
        words = line.split(None, 2) if "FAILED" in line or "PASSED" in line else []
        if len(words) > 1 and line.startswith("FAILED"):
            statuses[words[1]] = "FAILED"
        elif words[1:2] == ["PASSED"] and " PASSED " in line:
            statuses[words[0]] = "PASSED"
        elif len(words) > 1 and line.startswith("PASSED"):
            statuses[words[1]] = "PASSED"
    return statuses


def parse_django(text: str) -> Dict[str, str]:
    """Django's runner and `python -m unittest -v`: `name (module.Class) ... ok`.

    Output of the test may stand between `...` and a line that begins with ok. A docstring takes
    the place of the id. Failed subtests leave no status, and take that of the next test with them.
    """
    statuses, before = {}, ""  # type: Dict[str, str], str
    for line in map(str.strip, text.split("\n")):
        name, dots, result = line.partition(" ... ")
        before = name if dots else before
        if result == "ok" and line.startswith("test"):
            statuses[name] = "PASSED"
            continue
        if dots or line.startswith(("FAIL:", "ERROR:")):
            _django_line(line, statuses)
        if line.startswith("ok") and before:
            statuses[before] = "PASSED"
    for name in _django_interrupted(text):
        statuses[name] = "PASSED"
    if VERSION_TEST in text:
        statuses[VERSION_TEST] = "PASSED"
    return statuses


def parse_sympy(text: str) -> Dict[str, str]:
    """sympy's own runner, `bin/test -C --verbose`: `test_x ok`, and failures as banners too."""
    statuses, results = {}, {}  # type: Dict[str, str], Dict[str, str]
    words = {" ok": "PASSED", " F": "FAILED", " E": "ERROR"}
    for line in text.split("\n"):
        if ".py:" in line:
            first, end = line.find(" "), line.rfind(" ")
            at = line.rfind(".py:", first + 1, end) if first >= 0 else -1
            if at >= 0:
                statuses[line[first + 1 : end]] = "FAILED"
        line = line.strip()
        if line.startswith("test_") and line.endswith(tuple(words)):
            results[line.split(None, 1)[0]] = words[line[line.rindex(" ") :]]
    statuses.update(results)
    return statuses


PARSERS = {
    "pytest": parse_pytest,
    "pytest-options": parse_pytest_options,
    "pytest-colored": parse_pytest_colored,
    "pytest-noted": partial(parse_pytest_colored, noted=True),
    "pytest-progress": parse_pytest_progress,
    "matplotlib": parse_matplotlib,
    "seaborn": parse_seaborn,
    "unittest": parse_django,
    "sympy": parse_sympy,
}  # type: Dict[str, Callable[[str], Dict[str, str]]]


def _summary(text: str) -> Iterable[Tuple[str, str]]:
    """(id, status) of each line that begins with a status."""
    for line in SUMMARY.findall("\n" + text):
        words = _words(line)
        if len(words) > 1:
            yield words[1], words[0]


def _words(line: str) -> List[str]:
    """Status, id and the rest of a line of the short summary."""
    words = line.split(None, 2)
    if words[1:2] == ["-"] and line.startswith("FAILED"):
        words[1:] = words[2].split(None, 1) if len(words) > 2 else []
    return words


def _numbered(text: str) -> str:
    return text.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")


def short_name(name: str) -> str:
    """An id as those parsers leave it that change more than where it ends."""
    return _short_option(_numbered(name))


def _short_option(name: str) -> str:
    main, bracket, option = name.partition("[")
    option, closing, _ = option.rpartition("]")
    if not (bracket and closing):
        return name
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rpartition("/")[2]
    return "{}[{}]".format(main, option)


def _django_line(line: str, statuses: Dict[str, str]) -> None:
    for suffix in DJANGO_OK:
        if line.endswith(suffix):
            name = line[: -len(suffix)]
            if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                name = name.partition("...")[2].strip()
            statuses[name] = "PASSED"
            break
    if " ... skipped" in line:
        statuses[line.partition(" ... skipped")[0]] = "SKIPPED"
    for word, banner, status in DJANGO_WORDS:
        if line.endswith(word):
            statuses[line.partition(word)[0]] = status
        if line.startswith(banner) and len(line.split(None, 2)) > 1:
            statuses[line.split(None, 2)[1]] = status


def _django_interrupted(text: str) -> Iterable[str]:
    """Names whose result is cut in two by a message of many lines, just before `ok`."""
    at = text.find(TESTING)
    while at >= 0:
        end = text.find(" silenced).\nok", at + len(TESTING))
        if end < 0:
            return
        end += len(" silenced).\nok")
        if text[end : end + 1] in ("", "\n"):
            yield text[text.rfind("\n", 0, at) + 1 : at]
        at = text.find(TESTING, end)
