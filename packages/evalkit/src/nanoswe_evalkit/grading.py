"""From a stopped agent's sandbox to a verdict, never where the agent was.

In: the agent's sandbox (to extract the patch) and a way to open pristine ones (to grade it). Out:
the patch, and an outcome with its report. What harbor's patch policy drops is graded once without
and once with it: two verdicts that differ are TAMPER. Where tests never begin (a reinstall fails),
or a pass-to-pass test is skipped or expected to fail, they run without the patch too: what is so
there is our fault (GRADER_ERROR) or excused; what is not, the patch's. The log is parsed on the
host, under a nonce. Refuses (PatchError) a work tree that no longer yields a diff.
"""

import asyncio
import base64
import json
import re
import secrets
import shutil
import tarfile
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanoswe_evalkit.outcome import EvalkitError, Outcome
from nanoswe_evalkit.sandboxes.base import MIB, Sandbox
from nanoswe_harbor.checkout import git
from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.grader.policy import police
from nanoswe_harbor.task import Task

Opened = AbstractAsyncContextManager[Sandbox]
PATCH_BYTES = 8 * MIB
LOG_BYTES = 16 * MIB
DISK_BYTES = 64 * MIB
# What shells in sandboxes run.
SCRIPTS = {path.stem: path.read_text() for path in Path(__file__).parent.glob("scripts/*.sh")}
EXTRACT, EVALUATE = SCRIPTS["extract"], SCRIPTS["evaluate"]
EXTRACT_ENV = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
# Builds and tests ask git too, on a checkout that is perhaps not of the sandbox's uid.
OURS = {"GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*", "GIT_CONFIG_COUNT": "1"}
EVALUATE_ENV = {"TESTS": "/tmp/nanoswe-tests", **OURS}
REJECTED, NO_BASE = 79, 3
Run = dict[str, Any]  # of the tests: its log (packed), exit code, nonce and clocks
NOT_NEEDED = {"test.sh", "grade.py", "parsers.py", "policy.py", "expected.json"}


class PatchError(EvalkitError):
    """The agent left a work tree that yields no usable diff."""


@dataclass(frozen=True)
class Verdict:
    """`report` is report/1 with `dropped`, the paths that the policy took out of the patch, and
    `runs`, the logs. Where it took any, `raw_outcome` says what the whole patch is worth. `unsure`:
    only the tests without the patch could tell.
    """

    outcome: Outcome
    report: dict[str, Any] | None
    unsure: bool = False


async def extract_patch(task: Task, sandbox: Sandbox) -> str:
    """The diff of the work tree against the base commit; bytes that are not UTF-8 survive."""
    argv, limit = ["/bin/sh", "-c", EXTRACT, task.base_commit], PATCH_BYTES
    done = await sandbox.run(argv, env=EXTRACT_ENV, output_bytes=limit)
    if done.exit_code == NO_BASE and sandbox.checkout:  # the agent has removed it: bring it
        pack = await asyncio.to_thread(base_pack, sandbox.checkout, task.base_commit)
        done = await sandbox.run([*argv, "pack"], stdin=pack, env=EXTRACT_ENV, output_bytes=limit)
    if done.timed_out or done.exit_code:
        raise PatchError(f"no diff can be taken (exit {done.exit_code})")
    if done.truncated:
        raise PatchError(f"the diff is larger than {PATCH_BYTES} bytes")
    return done.stdout.decode("utf-8", errors="surrogateescape")


def base_pack(checkout: Path, commit: str) -> bytes:
    """A pack of a commit without its history."""
    objects = git(checkout, "rev-list", "--objects", "--no-walk", commit)
    return git(checkout, "pack-objects", "-q", "--stdout", stdin=objects)


async def grade_patch(task: Task, patch: str, pristine: Callable[[], Opened]) -> Verdict:
    """The verdict on a patch. `pristine` opens a sandbox on an untouched checkout."""
    try:
        kept, dropped = police(patch, task.test_files, _expected(task)["gold_files"])
    except ValueError as error:
        return Verdict(Outcome.PATCH_REJECTED, {"reason": str(error)})
    runs = [await _run_tests(task, text, pristine) for text in (kept, patch)[: 1 + bool(dropped)]]
    verdict = judge_logs(task, runs, dropped)
    if patch and verdict.unsure:
        runs.append(await _run_tests(task, "", pristine) | {"control": True})
        verdict = judge_logs(task, runs, dropped)
    return verdict


def judge_logs(task: Task, runs: Sequence[Run], dropped: Sequence[str]) -> Verdict:
    """The verdict by the logs alone: of the patch without, then with what was dropped; `control` is
    the run without any patch."""
    control = next((_report(task, run) for run in runs if "control" in run), None)
    judged = [_judge_log(task, run, control) for run in runs if "control" not in run]
    (outcome, report), *raw = judged
    unsure = control is None and any(r.get("infra") or r.get("excused") for _, r in judged)
    report.update([("raw_outcome", str(other)) for other, _ in raw], dropped=dropped, runs=runs)
    for other, whole in raw:  # where the whole patch let no test begin, nothing was forged
        if Outcome.GRADER_ERROR in (outcome, other):
            return Verdict(Outcome.GRADER_ERROR, report, unsure)
        forged = Outcome.UNRESOLVED if whole.get("infra") else Outcome.TAMPER
        outcome = outcome if outcome is other else forged
    return Verdict(outcome, report, unsure)


Grade = Callable[[Task, str, Callable[[], Opened]], Awaitable[Verdict]]


def is_full(work: Path) -> bool:
    """With so little to spare, a verdict is not about the agent."""
    return work.exists() and shutil.disk_usage(work).free < DISK_BYTES


class SharedVerdicts:
    """Grades equal patches of one task once, for as long as it lives; trials of one model repeat
    each other. A failure of the grader is never shared, nor what a full disk at `work` made.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._known: dict[tuple[Path, str], Verdict] = {}
        self._locks: defaultdict[tuple[Path, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def grade(self, task: Task, patch: str, pristine: Callable[[], Opened]) -> Verdict:
        key = task.path, patch
        async with self._locks[key]:
            verdict = self._known.get(key) or await grade_patch(task, patch, pristine)
            if verdict.outcome is not Outcome.GRADER_ERROR and not is_full(self._work):
                self._known[key] = verdict
        return verdict


async def _run_tests(task: Task, patch: str, pristine: Callable[[], Opened]) -> Run:
    """Apply a patch to a pristine checkout and run the task's tests."""
    nonce = secrets.token_hex(8)
    bundle = _bundle(task.path) + _member("nonce", nonce.encode())
    bundle += _member("model.patch", patch.encode("utf-8", "surrogateescape"))
    async with pristine() as sandbox:
        began = time.monotonic()
        done = await sandbox.run(
            ["/bin/bash", "-c", EVALUATE], stdin=bundle + END_OF_TAR,
            env=EVALUATE_ENV, timeout_sec=task.verifier_timeout_sec, output_bytes=LOG_BYTES
        )  # fmt: skip
        took = time.monotonic() - began
    packed = base64.b85encode(zlib.compress(done.stdout)).decode()
    ready = re.search(rb"^>>>>> Ready %b (\d+)$" % nonce.encode(), done.stdout, re.MULTILINE)
    install = min(int(ready[1]) / 1e6, took) if ready else 0.0
    clocks = {"install_sec": round(install, 4), "tests_sec": round(took - install, 4)}
    return {"log": packed, "exit_code": done.exit_code, "nonce": nonce, **clocks}


def log_of(run: Run) -> str:
    return zlib.decompress(base64.b85decode(run["log"])).decode("utf-8", errors="replace")


def _judge_log(
    task: Task, run: Run, control: dict[str, Any] | None
) -> tuple[Outcome, dict[str, Any]]:
    if run["exit_code"] == REJECTED:
        log = log_of(run)
        if log.endswith(f">>>>> Model Patch Failed {run['nonce']}\n"):
            return Outcome.PATCH_REJECTED, {"reason": log.strip()[-2000:]}
    report = _report(task, run, control and control["status"])
    if report["infra"] and (control is None or control["infra"]):
        return Outcome.GRADER_ERROR, report
    good = Outcome.RESOLVED if report["resolved"] else Outcome.UNRESOLVED
    return Outcome.TAMPER if report["tamper"] else good, report


def _report(task: Task, run: Run, before: dict[str, str] | None = None) -> dict[str, Any]:
    expected = _expected(task)
    return grade(log_of(run), expected, run["exit_code"], run["nonce"], before=before)


def _expected(task: Task) -> dict[str, Any]:
    text = (task.path / "tests" / "expected.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


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
