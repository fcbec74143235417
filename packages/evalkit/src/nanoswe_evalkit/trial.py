"""`run_trial`: one attempt at one task by one agent, with its verdict. Train and eval both call it.

In: a task, an agent, a sandbox factory, the model's base URL. Out: a frozen Trial; this is the one
place where errors become outcomes. The agent's sandbox is gone before a pristine one grades.
Refuses nothing: whatever fails is in the Trial. Only cancellation passes through.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from nanoswe_evalkit.agents.base import Agent, Job, Message, ModelConfig, ModelError
from nanoswe_evalkit.foreign import judge
from nanoswe_evalkit.grading import Grade, PatchError, Verdict, extract_patch, grade_patch, is_full
from nanoswe_evalkit.outcome import EvalkitError, Outcome, Stop, reward_of
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_harbor.task import Task

SCHEMA = "trial/1"


@dataclass(frozen=True)
class Trial:
    """One line of trials.jsonl: `stop` is how the agent ended, `outcome` the verdict.

    `key` names the harness, the task's content and the run's settings; a resumed run keeps no trial
    of another. `tries`: the errors of the tries before.
    `timings` are seconds: queue (for a place among the trials at once), create, agent (and of that
    model, its calls), extract, grade (and of that install, before the tests, and tests), total.
    """

    trial_id: str
    task_id: str
    attempt: int
    try_: int
    stop: Stop | None
    outcome: Outcome
    reward: float | None
    turns: int
    patch: str
    report: dict[str, Any] | None
    timings: dict[str, float]
    error: str = ""
    messages: tuple[Message, ...] = field(default=(), repr=False)
    agent: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    tries: tuple[str, ...] = ()
    schema: str = SCHEMA


def to_line(trial: Trial) -> str:
    """One JSON line, ASCII, so that a patch that is not UTF-8 survives."""
    return json.dumps(vars(trial)) + "\n"


def from_record(record: dict[str, Any]) -> Trial:
    """The reverse, of a parsed line."""
    stop = None if record["stop"] is None else Stop(record["stop"])
    outcome = Outcome(record["outcome"])
    lists = {name: tuple(record.get(name, ())) for name in ("messages", "tries")}
    if record["reward"] != reward_of(outcome) or not isinstance(record["timings"], dict):
        raise ValueError("its reward is not its outcome's, or it has no timings")
    return Trial(**{**record, "stop": stop, "outcome": outcome, **lists})


def seed_of(seed: int, trial_id: str) -> int:
    """A 31-bit seed that depends on nothing but the run's seed and the trial."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{trial_id}".encode()).digest()[:4], "big") >> 1


async def run_trial(
    task: Task, attempt: int, *, trial_id: str, agent: Agent, sandboxes: SandboxFactory,
    base_url: str, model: ModelConfig, try_: int = 0, grade_empty: bool = False,
    grade: Grade = grade_patch
) -> Trial:  # fmt: skip
    """Run the agent, extract its patch, grade it (an empty one only with `grade_empty`)."""
    stop, patch, error = None, "", ""
    messages, facts, timings = list[Message](), dict[str, Any](), dict[str, float]()
    model = replace(model, seed=seed_of(model.seed, trial_id))
    try:
        with _clock(timings, "total_sec"):
            async with sandboxes.ahead(task) as pristine:
                began = time.monotonic()
                async with sandboxes.open(task) as sandbox:
                    timings["create_sec"] = round(time.monotonic() - began, 4)
                    job = Job(task, sandbox, base_url, model, messages, facts)
                    try:
                        with _clock(timings, "agent_sec"):
                            stop = await _run_agent(agent, job)
                    except Exception:
                        with suppress(EvalkitError):  # for the record: it is not graded
                            patch = await extract_patch(task, sandbox) if task.base_commit else ""
                        raise
                    verdict = Verdict(Outcome.NO_PATCH, None)
                    with _clock(timings, "extract_sec"):
                        if task.base_commit:
                            patch = await extract_patch(task, sandbox)
                        else:  # a Harbor task of others
                            verdict = await judge(task, sandbox, sandboxes.open)
                if patch or (grade_empty and task.base_commit):
                    with _clock(timings, "grade_sec"):
                        verdict = await grade(task, patch, pristine)
                    runs = (verdict.report or {}).get("runs", ())
                    for name in ("install_sec", "tests_sec"):
                        timings[name] = round(sum(run.get(name, 0) for run in runs), 4)
    except PatchError as failure:
        verdict, error = Verdict(Outcome.PATCH_REJECTED, None), str(failure)
    except Exception as failure:
        name = "" if isinstance(failure, EvalkitError) else f"{type(failure).__name__}: "
        verdict, error = Verdict(Outcome.INFRA_ERROR, None), f"{name}{failure}"
        facts |= getattr(failure, "facts", {})
    lost = verdict.outcome not in (Outcome.RESOLVED, Outcome.INFRA_ERROR)
    if lost and is_full(sandboxes.work):
        verdict, error = Verdict(Outcome.INFRA_ERROR, None), f"{sandboxes.work}: the disk is full"
    if "model_sec" in facts:
        timings["model_sec"] = round(facts.pop("model_sec"), 4)
    outcome, reward = verdict.outcome, reward_of(verdict.outcome)
    turns = sum(message["role"] == "assistant" for message in messages)
    told = (stop, outcome, reward, turns, patch, verdict.report, timings, error, tuple(messages))
    return Trial(trial_id, task.task_id, attempt, try_, *told, agent=facts)


async def _run_agent(agent: Agent, job: Job) -> Stop:
    """A timeout ends the agent, not the trial: what it has done so far is graded. But where an
    engine that hangs has taken the time, by a call of more than half of it, that is our failure.
    """
    try:
        async with asyncio.timeout(job.task.agent_timeout_sec) as scope:
            return await agent.run(job)
    except TimeoutError:
        if not scope.expired():
            raise
        waited = job.facts.get("unanswered_sec", 0.0)
        if waited > min(job.model.timeout_sec, job.task.agent_timeout_sec / 2):
            raise ModelError(f"model at {job.base_url}: no answer for {waited:.1f} s") from None
        return Stop.TIMEOUT


@contextmanager
def _clock(timings: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        timings[name] = round(time.monotonic() - began, 4)
