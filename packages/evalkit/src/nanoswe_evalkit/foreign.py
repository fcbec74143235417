"""Harbor tasks that others made: solved by their own solve.sh, judged by their own test.sh.

In: a task without a base commit, the agent's sandbox, a way to open one more. Out: a verdict by the
reward that test.sh writes, where the agent was; or, where the task wants a separate verifier, in a
fresh container that gets what the task declares as artifacts. No network, as everywhere. A test.sh
without a reward is a GRADER_ERROR. Refuses nothing.
"""

import io
import json
import math
import tarfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nanoswe_evalkit.grading import LOG_BYTES, SCRIPTS, Opened, Verdict
from nanoswe_evalkit.outcome import Outcome
from nanoswe_evalkit.sandboxes.base import MIB, Sandbox
from nanoswe_harbor.task import Task

ARTIFACT_BYTES = 64 * MIB


async def solve(task: Task, sandbox: Sandbox) -> None:
    """What upstream's oracle does: whatever solve.sh returns, its work is judged."""
    argv = ["/bin/bash", "-c", SCRIPTS["solve"]]
    await sandbox.run(argv, stdin=_tar(task.path / "solution", "."))


async def judge(task: Task, sandbox: Sandbox, opened: Callable[[Task], Opened]) -> Verdict:
    """The verdict on what the agent left in `sandbox`."""
    config = tomllib.loads((task.path / "task.toml").read_text(encoding="utf-8"))
    verifier, tests = config.get("verifier", {}), task.path / "tests"
    if verifier.get("environment_mode", "shared") == "shared":
        return await _verify(task, sandbox, _tar(tests, "tests"))
    hooks = "\n".join(hook["command"] for hook in verifier.get("collect", ()))
    sources = [a if isinstance(a, str) else a["source"] for a in config.get("artifacts", ())]
    argv = ["/bin/bash", "-c", SCRIPTS["collect"], hooks, *sources]
    artifacts = (await sandbox.run(argv, output_bytes=ARTIFACT_BYTES)).stdout
    fresh = replace(task, docker_image=str(tests)) if (tests / "Dockerfile").is_file() else task
    async with opened(fresh) as other:
        return await _verify(task, other, artifacts + _tar(tests, "tests"))


async def _verify(task: Task, sandbox: Sandbox, files: bytes) -> Verdict:
    done = await sandbox.run(
        ["/bin/bash", "-c", SCRIPTS["verify"]], stdin=files, timeout_sec=task.verifier_timeout_sec,
        output_bytes=LOG_BYTES
    )  # fmt: skip
    log, _, text = done.stdout.decode("utf-8", errors="replace").rpartition(">>>>> Reward\n")
    try:
        value = json.loads(text)
        rewards = list(map(float, value.values() if isinstance(value, dict) else [value]))
        if not rewards or not all(map(math.isfinite, rewards)):
            raise ValueError("no number")
    except (TypeError, ValueError) as error:
        reason = f"test.sh left no reward ({error})"
        return Verdict(Outcome.GRADER_ERROR, {"reason": reason, "log": log[-4000:]})
    outcome = Outcome.RESOLVED if min(rewards) >= 1 else Outcome.UNRESOLVED
    return Verdict(outcome, {"reason": "", "rewards": value, "log": log[-4000:]})


def _tar(folder: Path, name: str) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(folder, arcname=name)
    return file.getvalue()
