"""Patches: the git diffs of a row, read strictly.

In: the text of a diff. Out: the files it changes, its text as `git apply` wants it, or its reverse.
Refuses (ValueError, one line) what is no git diff, a cut hunk, a binary file without its data, and
a path that leaves the repository or enters `.git`.
"""

import re
from collections.abc import Iterator

HUNK = re.compile(r"^@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)$", re.DOTALL)
NAME = re.compile(r"^(--- |\+\+\+ |rename from |rename to )(.*)$", re.DOTALL)
ESCAPE = re.compile(rb"\\([0-3][0-7]{2})")
OTHER_SIGN = str.maketrans("+-", "-+")


def changes(patch: str) -> list[tuple[str, str]]:
    """(old name, new name) of each changed file, "" where there is none. Raises ValueError."""
    found: list[list[str]] = []
    for is_body, line in _lines(patch):
        if is_body:
            continue
        if line.startswith("diff --git "):
            # Without a rename both names are equal but for a/ and b/: each is half of the line.
            names = line.removeprefix("diff --git ")
            half = len(names) // 2
            found.append([_unquoted(names[:half]), _unquoted(names[half + 1 :])])
        elif not found and line.strip():
            raise ValueError(f"not a git diff: begins with {line[:40]!r}")
        elif line.startswith("Binary files "):
            raise ValueError(f"a binary file without its data: {found[-1][1]}")
        elif line.startswith(("new file ", "deleted file ")):
            found[-1][line.startswith("deleted")] = ""
        elif name := NAME.match(line):
            found[-1][name[1] in ("+++ ", "rename to ")] = _unquoted(name[2])
    if not found:
        raise ValueError("not a git diff: no line begins with `diff --git`")
    for path in sum(found, []):
        parts = path.lower().split("/")
        if path.startswith("/") or ".." in parts or ".git" in parts:
            raise ValueError(f"a path that leaves the repository: {path[:100]!r}")
    return [(old, new) for old, new in found]


def clean(patch: str) -> str:
    """A checked patch with a final newline, and with LF where its headers end in CRLF."""
    if "\r\n" in patch.partition("\n@@ ")[0]:
        patch = patch.replace("\r\n", "\n")
    patch = patch if patch.endswith("\n") else patch + "\n"
    changes(patch)
    return patch


def reverse(patch: str) -> str:
    """The patch that undoes one which only edits texts. Raises ValueError for any other."""
    if any(old != new for old, new in changes(patch)) or "\nGIT binary patch\n" in patch:
        raise ValueError("only a patch that edits text files can be reversed")
    lines = (
        line[:1].translate(OTHER_SIGN) + line[1:] if is_body else HUNK.sub(r"@@ -\2 +\1 @@\3", line)
        for is_body, line in _lines(patch)
    )
    return "\n".join(lines) + "\n"


def _lines(patch: str) -> Iterator[tuple[bool, str]]:
    """(does it belong to a hunk's body?, line) for each line. Raises ValueError for a cut hunk."""
    old = new = 0
    for line in patch.removesuffix("\n").split("\n"):
        is_body = old > 0 or new > 0
        if is_body:
            if line[:1] not in ("", " ", "-", "+", "\\"):
                raise ValueError(f"a hunk that is cut short, before {line[:40]!r}")
            old -= line[:1] in ("", " ", "-")
            new -= line[:1] in ("", " ", "+")
        elif line.startswith("@@ "):
            if not (match := HUNK.match(line)):
                raise ValueError(f"a hunk header that does not parse: {line[:60]!r}")
            old, new = (int(side.partition(",")[2] or 1) for side in match.group(1, 2))
        yield is_body, line
    if old > 0 or new > 0:
        raise ValueError("a hunk that is cut short, at the end")


def _unquoted(name: str) -> str:
    """A name of a header line, without quotes, a/ or b/ and time stamp; "" for /dev/null."""
    name = name.split("\t")[0].rstrip("\r")
    if name.startswith('"'):
        octal = ESCAPE.sub(lambda code: bytes([int(code[1], 8)]), name.strip('"').encode())
        name = re.sub(rb"\\(.)", rb"\1", octal).decode(errors="replace")
    return "" if name == "/dev/null" else re.sub(r"^[ab]/", "", name)
