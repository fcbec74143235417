"""From a stopped agent's sandbox to a verdict, never where the agent was.

In: the agent's sandbox (to extract the patch) and a way to open pristine ones (to grade it). Out:
the patch, and an outcome with its report. What harbor's patch policy drops is graded once without
and once with it: two verdicts that differ are TAMPER. The log is parsed on the host, under a nonce.
Refuses (PatchError) a work tree that no longer yields a diff.
"""

import asyncio
import json
import secrets
import tarfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoswe_evalkit.outcome import EvalkitError, Outcome
from nanoswe_evalkit.sandboxes.base import MIB, Sandbox
from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.grader.policy import police, sections
from nanoswe_harbor.task import Task

Opened = AbstractAsyncContextManager[Sandbox]
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
# The nonce travels in a file that run_eval.sh removes: arguments and environments can be read.
EVALUATE = """
mkdir -p "$TESTS" && tar -xf - --no-same-owner -C "$TESTS" || exit 1
if [ -s "$TESTS/model.patch" ] && ! git apply --whitespace=nowarn "$TESTS/model.patch"; then
  echo ">>>>> Model Patch Failed $(cat "$TESTS/nonce")"; exit 79
fi
exec bash "$TESTS/run_eval.sh"
"""
REJECTED = 79
TESTS_DIR = "/tmp/nanoswe-tests"
NOT_NEEDED = {"test.sh", "grade.py", "parsers.py", "policy.py", "expected.json"}


class PatchError(EvalkitError):
    """The agent left a work tree that yields no usable diff."""


@dataclass(frozen=True)
class Verdict:
    """`report` is report/1 with `dropped`, the paths that the policy took out of the patch.

    Where it took any, `raw_outcome` says what the whole patch is worth.
    """

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


async def grade_patch(task: Task, patch: str, pristine: Callable[[], Opened]) -> Verdict:
    """The verdict on a patch. `pristine` opens a sandbox on an untouched checkout."""
    gold = (task.path / "solution" / "gold.patch").read_text(encoding="utf-8", errors="replace")
    kept, dropped = police(patch, task.test_files, [path for path, _ in sections(gold)])
    verdict = await _run_tests(task, kept, pristine)
    if not dropped:
        return verdict
    raw = await _run_tests(task, patch, pristine)
    report = {**(verdict.report or {}), "dropped": dropped, "raw_outcome": str(raw.outcome)}
    outcomes = verdict.outcome, raw.outcome
    if Outcome.GRADER_ERROR in outcomes:
        return Verdict(Outcome.GRADER_ERROR, report)
    return Verdict(verdict.outcome if len(set(outcomes)) == 1 else Outcome.TAMPER, report)


Grade = Callable[[Task, str, Callable[[], Opened]], Awaitable[Verdict]]


class SharedVerdicts:
    """Grades equal patches of one task once, for as long as it lives; trials of one model repeat
    each other. A failure of the grader is never shared.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], Verdict] = {}
        self._locks: defaultdict[tuple[Path, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def grade(self, task: Task, patch: str, pristine: Callable[[], Opened]) -> Verdict:
        key = task.path, patch
        async with self._locks[key]:
            verdict = self._known.get(key) or await grade_patch(task, patch, pristine)
            if verdict.outcome is not Outcome.GRADER_ERROR:
                self._known[key] = verdict
        return verdict


async def _run_tests(task: Task, patch: str, pristine: Callable[[], Opened]) -> Verdict:
    """Apply a patch to a pristine checkout, run the task's tests, judge the log."""
    nonce = secrets.token_hex(8)
    bundle = _bundle(task.path) + _member("nonce", nonce.encode())
    bundle += _member("model.patch", patch.encode("utf-8", "surrogateescape"))
    async with pristine() as sandbox:
        done = await sandbox.run(
            ["/bin/bash", "-c", EVALUATE], stdin=bundle + END_OF_TAR, env={"TESTS": TESTS_DIR},
            timeout_sec=task.verifier_timeout_sec, output_bytes=LOG_BYTES
        )  # fmt: skip
    log = done.stdout.decode("utf-8", errors="replace")
    if done.exit_code == REJECTED and log.endswith(f">>>>> Model Patch Failed {nonce}\n"):
        return Verdict(Outcome.PATCH_REJECTED, {"reason": log.strip()[-2000:], "dropped": []})
    expected = json.loads((task.path / "tests" / "expected.json").read_text(encoding="utf-8"))
    report = {**grade(log, expected, done.exit_code, nonce), "dropped": []}
    if report["infra"]:
        return Verdict(Outcome.GRADER_ERROR, {**report, "log": log[-4000:]})
    if report["tamper"]:
        return Verdict(Outcome.TAMPER, report)
    return Verdict(Outcome.RESOLVED if report["resolved"] else Outcome.UNRESOLVED, report)


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
