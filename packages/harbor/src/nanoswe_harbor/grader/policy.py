# ruff: noqa: UP006, UP032, UP035  (this file is copied into images and runs on Python 3.5)
"""The patch policy: `police(patch, test_files, gold_files) -> (kept patch, dropped paths)`.

In: a git diff without renames. Out: the diff without test files and test infrastructure, which so
stay as the base commit has them, unless the gold patch touches them: two test runs say what it was
worth. Refuses (ValueError) what `git diff` does not write: git apply could find more there.
As a program, `policy.py PATCH KEPT`: exit code 0 nothing dropped, 1 something, 2 broken, 3 refused.
"""

import fnmatch
import io
import json
import os
import posixpath
import re
import sys
from typing import Iterable, List, Tuple

INFRA_FILES = (
    "conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml"
    " sitecustomize.py usercustomize.py *.pth"
).split()
# Python puts the checkout first on its path: a new module of such a name there replaces the runner,
# an installer, or something they import. Left out: packages have these names, no runner needs them.
_FILES = os.listdir(os.path.dirname(os.__file__))  # what Python before 3.10 has instead
STDLIB = getattr(sys, "stdlib_module_names", {name.split(".")[0] for name in _FILES})
COMMON = "test code profile sched secrets statistics trace this".split()
INSTALLED = (
    "pytest _pytest pluggy py iniconfig packaging pygments exceptiongroup tomli attr attrs xdist"
    " pip setuptools wheel pkg_resources _distutils_hack"
).split()
SHADOWED = (set(STDLIB) - set(COMMON)) | set(INSTALLED)

HEADER = re.compile("(?:(?:old|new|deleted file|new file) mode|index) [0-9a-f. ]+")
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@(?: .*)?", re.DOTALL)
SIGNS = (" ", "-", "+", "\\")
BINARY = re.compile(r"(?:literal|delta) \d+")


def police(
    patch: str, test_files: Iterable[str], gold_files: Iterable[str]
) -> Tuple[str, List[str]]:
    """(the patch without what it may not change, the paths that were dropped)."""
    tests, allowed = set(test_files), set(gold_files)
    folders = tuple(posixpath.dirname(test) + "/" for test in tests if "/" in test)
    kept, dropped = [], []  # type: List[str], List[str]
    for path, section in sections(patch):
        is_test = path in tests or path.startswith(folders)
        is_infra = any(fnmatch.fnmatch(posixpath.basename(path), name) for name in INFRA_FILES)
        if path not in allowed and (is_test or is_infra or _shadows(path, section)):
            dropped.append(path)
        else:
            kept.append(section)
    return "".join(kept), dropped


def sections(patch: str) -> List[Tuple[str, str]]:
    """(path, text) of each file of a git diff. Raises ValueError."""
    lines = patch.split("\n")
    end = len(lines) - (not lines[-1])
    found, at = [], 0
    while at < end:
        begin = at
        path, names = _names(lines[at])
        at += 1
        while at < end and (HEADER.fullmatch(lines[at]) or lines[at].rstrip("\t") in names):
            at += 1
        if at < end and lines[at] == "GIT binary patch":
            at += 1
            for _ in range(2):  # there and back, each up to an empty line
                at = lines.index("", at) + 1 if BINARY.fullmatch(lines[at]) else at
        while at < end and lines[at].startswith("@@"):
            at = _after_hunk(lines, at)
        found.append((path, "\n".join(lines[begin:at]) + "\n" * (at < len(lines))))
    return found


def _names(line: str) -> Tuple[str, Tuple[str, ...]]:
    """(the path of a section by its first line, how `---` and `+++` lines may name it)."""
    # Without renames both names are equal but for a/ and b/, so each is half of the line.
    names = line[len("diff --git ") :]
    old, new = names[: len(names) // 2], names[len(names) // 2 + 1 :]
    quote = '"' * old.startswith('"')
    name = old[len(quote) + 2 : len(old) - len(quote)]
    if line != "diff --git {0}a/{1}{0} {0}b/{1}{0}".format(quote, name):
        raise ValueError("not a line of a git diff: {!r}".format(line[:200]))
    path = name
    if quote:
        escaped = name.encode("utf-8", "surrogateescape").decode("unicode_escape")
        path = escaped.encode("latin-1").decode("utf-8", "surrogateescape")
    if posixpath.normpath(path) != path or path.startswith(("/", "../")):
        raise ValueError("not a path of a git diff: {!r}".format(path[:200]))
    return path, ("--- " + old, "+++ " + new, "--- /dev/null", "+++ /dev/null")


def _after_hunk(lines: List[str], at: int) -> int:
    """Where the hunk that begins at a line ends, by the counts in that line."""
    match = HUNK.fullmatch(lines[at])
    old, new = [int(count or 1) for count in match.groups()] if match else (-1, -1)
    at += 1
    while (old > 0 or new > 0) and lines[at : at + 1] and lines[at].startswith(SIGNS):
        old -= lines[at].startswith((" ", "-"))
        new -= lines[at].startswith((" ", "+"))
        at += 1
    if old or new:
        raise ValueError("not a hunk of a git diff, line {}".format(at + 1))
    return at + (lines[at : at + 1] == ["\\ No newline at end of file"])


def _shadows(path: str, section: str) -> bool:
    """Is it a new module that hides one of the test runner's?"""
    top, _, rest = path.partition("/")
    module = rest.startswith("__init__.") if rest else "." in top
    is_new = "\nnew file mode " in section.split("\n@@", 1)[0]
    return is_new and module and top.split(".")[0] in SHADOWED


def main(argv: List[str]) -> int:
    """Police the file PATCH by tests/expected.json into the file KEPT."""
    expected = os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json")
    code = 2
    try:
        with io.open(expected, encoding="utf-8") as stream:
            facts = json.load(stream)
        with io.open(argv[0], encoding="utf-8", errors="surrogateescape", newline="") as stream:
            patch = stream.read()
        code = 3
        kept, dropped = police(patch, facts["test_files"], facts["gold_files"])
        with io.open(argv[1], "w", encoding="utf-8", errors="surrogateescape", newline="") as out:
            out.write(kept)
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.stderr.write("error: cannot police: {}\n".format(error))
        return code if isinstance(error, ValueError) else 2
    sys.stdout.write("".join("dropped {!r}\n".format(path) for path in dropped))
    return 1 if dropped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
