# ruff: noqa: UP006, UP032, UP035  (this file is copied into images and runs on Python 3.5)
"""The patch policy: `police(patch, test_files, gold_files) -> (kept patch, dropped paths)`.

In: a git diff without renames. Out: the diff without test files and test infrastructure, which so
stay as the base commit has them, unless the gold patch touches them. As a program, `policy.py PATCH
KEPT`: exit code 0 nothing dropped, 1 something (KEPT is written), 2 broken. Refuses nothing: what
the drop was worth is for two runs of the tests to say. Standard library only; Python 3.5 and newer.
"""

import fnmatch
import io
import json
import os
import posixpath
import sys
from typing import Iterable, List, Tuple

INFRA_FILES = (
    "conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml"
    " sitecustomize.py usercustomize.py *.pth"
).split()
# Python puts the checkout first on its path: a new module of such a name there replaces the runner
# or something it imports. `test` is left out: it is a common name and nothing imports it.
_FILES = os.listdir(os.path.dirname(os.__file__))  # what Python before 3.10 has instead
STDLIB = getattr(sys, "stdlib_module_names", {name.split(".")[0] for name in _FILES})
SHADOWED = (set(STDLIB) - {"test"}) | {"pytest", "_pytest", "pluggy", "py", "iniconfig"}


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
    """(path, text) of each file of a git diff; inside one no line starts with `diff --git `."""
    found = []
    for part in ("\n" + patch).split("\ndiff --git ")[1:]:
        # Without renames both names are equal but for a/ and b/, so each is half of the line.
        names = part.split("\n", 1)[0]
        name = names[: len(names) // 2].strip('"')
        found.append((name[2:] if name.startswith("a/") else name, "diff --git " + part + "\n"))
    if found:  # the split took the newline before each section, so the last one has one too many
        found[-1] = (found[-1][0], found[-1][1][:-1])
    return found


def _shadows(path: str, section: str) -> bool:
    """Is it a new module that hides one of the test runner's?"""
    top = path.split("/")[0].split(".")[0]
    return top in SHADOWED and "\nnew file mode " in section.split("\n@@", 1)[0]


def main(argv: List[str]) -> int:
    """Police the file PATCH by tests/expected.json into the file KEPT."""
    expected = os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json")
    try:
        with io.open(expected, encoding="utf-8") as stream:
            facts = json.load(stream)
        with io.open(argv[0], encoding="utf-8", errors="surrogateescape", newline="") as stream:
            kept, dropped = police(stream.read(), facts["test_files"], facts["gold_files"])
        with io.open(argv[1], "w", encoding="utf-8", errors="surrogateescape", newline="") as out:
            out.write(kept)
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.stderr.write("error: cannot police: {}\n".format(error))
        return 2
    sys.stdout.write("".join("dropped {!r}\n".format(path) for path in dropped))
    return 1 if dropped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
