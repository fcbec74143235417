"""From a stopped agent's sandbox to a verdict, never where the agent was.

In: the agent's sandbox (to extract the patch) and a pristine one (to grade it). Out: the patch, and
an outcome with its report. Test files and test infrastructure that the gold patch leaves alone are
dropped from the patch, and touching them is TAMPER. The log is parsed on the host, under a nonce.
Refuses (PatchError) a work tree that no longer yields a diff.
"""

import fnmatch
import json
import posixpath
import re
import secrets
import sys
import tarfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoswe_evalkit.outcome import EvalkitError, Outcome
from nanoswe_evalkit.sandboxes.base import MIB, Sandbox
from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.task import Task

PATCH_BYTES = 8 * MIB
LOG_BYTES = 16 * MIB
# The agent may have written .git/config and hooks: what could run or alter a diff is overridden.
EXTRACT = """
exec 2>/dev/null
rm -f .git/index.lock
g() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false \
  -c core.quotePath=false -c core.attributesFile=/dev/null -c core.excludesFile=/dev/null "$@"; }
g add -A && g diff --cached --binary --no-renames --no-ext-diff --no-textconv --no-color "$0"
"""
EXTRACT_ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
EVALUATE = """
mkdir -p "$TESTS" && tar -xf - --no-same-owner -C "$TESTS" || exit 1
if [ -s "$TESTS/model.patch" ] && ! git apply --whitespace=nowarn "$TESTS/model.patch"; then
  echo ">>>>> Model Patch Failed $NANOSWE_NONCE"; exit 1
fi
exec bash "$TESTS/run_eval.sh"
"""
TESTS_DIR = "/tmp/nanoswe-tests"
NOT_NEEDED = {"test.sh", "grade.py", "parsers.py", "expected.json"}
INFRA_FILES = ("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "sitecustomize.py", "*.pth")
# Python puts the checkout first on its path: a new module of such a name there replaces the runner
# or something it imports. `test` is left out: it is a common name and nothing imports it.
SHADOWED = (sys.stdlib_module_names - {"test"}) | {"pytest", "_pytest", "pluggy"}


class PatchError(EvalkitError):
    """The agent left a work tree that yields no usable diff."""


@dataclass(frozen=True)
class Verdict:
    """`report` is report/1, with `dropped`: the paths that the policy took out of the patch."""

    outcome: Outcome
    report: dict[str, Any] | None


async def extract_patch(task: Task, sandbox: Sandbox) -> str:
    """The diff of the work tree against the base commit; bytes that are not UTF-8 survive."""
    argv = ["/bin/sh", "-c", EXTRACT, task.base_commit]
    done = await sandbox.run(argv, env=EXTRACT_ENV, output_bytes=PATCH_BYTES)
    if done.timed_out or done.exit_code:
        raise PatchError(f"no diff can be taken (exit {done.exit_code})")
    if done.truncated:
        raise PatchError(f"the diff is larger than {PATCH_BYTES} bytes")
    return done.stdout.decode("utf-8", errors="surrogateescape")


async def grade_patch(task: Task, patch: str, sandbox: Sandbox) -> Verdict:
    """Apply the policed patch to a pristine checkout, run the task's tests, judge the log."""
    kept, dropped, tampered = police(task, patch)
    nonce = secrets.token_hex(8)
    bundle = _bundle(task.path) + _member("model.patch", kept.encode("utf-8", "surrogateescape"))
    env = {"TESTS": TESTS_DIR, "NANOSWE_NONCE": nonce}
    done = await sandbox.run(
        ["/bin/bash", "-c", EVALUATE],
        stdin=bundle + END_OF_TAR,
        env=env,
        timeout_sec=task.verifier_timeout_sec,
        output_bytes=LOG_BYTES,
    )
    log = done.stdout.decode("utf-8", errors="replace")
    if f">>>>> Model Patch Failed {nonce}" in log and ">>>>> Start Test Output" not in log:
        return Verdict(Outcome.PATCH_REJECTED, {"reason": log.strip()[-2000:], "dropped": dropped})
    expected = json.loads((task.path / "tests" / "expected.json").read_text(encoding="utf-8"))
    report = {**grade(log, expected, done.exit_code, nonce), "dropped": dropped}
    if tampered:
        return Verdict(Outcome.TAMPER, report)
    if report["infra"]:
        return Verdict(Outcome.GRADER_ERROR, {**report, "log": log[-4000:]})
    return Verdict(Outcome.RESOLVED if report["resolved"] else Outcome.UNRESOLVED, report)


def police(task: Task, patch: str) -> tuple[str, list[str], bool]:
    """(patch without test files and test infrastructure, what was dropped, is that tampering?)"""
    gold = (task.path / "solution" / "gold.patch").read_text(encoding="utf-8", errors="replace")
    allowed = {path for path, _ in sections(gold)}
    kept, dropped = [], []
    for path, section in sections(patch):
        if path not in allowed and (_is_test_path(task, path) or _shadows(path, section)):
            dropped.append(path)
        else:
            kept.append(section)
    return "".join(kept), dropped, bool(dropped)


def sections(patch: str) -> list[tuple[str, str]]:
    """(path, text) of each file of a git diff; inside one no line starts with `diff --git `."""
    parts = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    found = []
    for part in parts:
        if part.startswith("diff --git "):
            # Without renames both names are equal but for a/ and b/, so each is half of the line.
            names = part[len("diff --git ") : part.index("\n")]
            name = names[: len(names) // 2].strip('"')
            found.append((name.removeprefix("a/"), part))
    return found


def _is_test_path(task: Task, path: str) -> bool:
    folders = {posixpath.dirname(test) for test in task.test_files} - {""}
    in_folder = any(path.startswith(f"{folder}/") for folder in folders)
    is_infra = any(fnmatch.fnmatch(posixpath.basename(path), name) for name in INFRA_FILES)
    return path in task.test_files or in_folder or is_infra


def _shadows(path: str, section: str) -> bool:
    """Is it a new module that hides one of the test runner's?"""
    top = path.split("/")[0].split(".")[0]
    return top in SHADOWED and "\nnew file mode " in section.partition("\n@@")[0]


END_OF_TAR = bytes(1024)


@lru_cache(maxsize=1024)
def _bundle(path: Path) -> bytes:
    """What run_eval.sh needs of the tests folder, as tar members."""
    files = sorted(p for p in (path / "tests").rglob("*") if p.is_file())
    names = [(p.relative_to(path / "tests").as_posix(), p) for p in files]
    return b"".join(_member(name, p.read_bytes()) for name, p in names if name not in NOT_NEEDED)


def _member(name: str, data: bytes) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    return info.tobuf() + data + bytes(-len(data) % 512)
