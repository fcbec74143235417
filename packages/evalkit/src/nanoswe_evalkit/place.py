"""Where trials run: in this process, or as tasks of a Ray cluster (the extra `ray`).

In: a recipe. Out: `run_trial` with agent, sandboxes and grading filled in. Ray starts a trial on a
node whose memory resource has what its task asks for. A node needs this package, tasks, mirror and
an agent's Python at the same paths, and sandboxes of its own; it writes nothing of the run. A try
on a node that is lost is an infrastructure error: the next goes elsewhere. Refuses (EvalkitError) a
sandbox that cannot start here, a mirror that is none, no ray, no cluster.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from nanoswe_evalkit.agents.base import Agent, NopAgent, OracleAgent
from nanoswe_evalkit.agents.command import CommandAgent
from nanoswe_evalkit.agents.nano import NanoAgent
from nanoswe_evalkit.agents.runner import RunnerAgent
from nanoswe_evalkit.grading import SharedVerdicts, grade_patch
from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.recipe import AgentSection, Recipe
from nanoswe_evalkit.records import alone
from nanoswe_evalkit.runner import Run
from nanoswe_evalkit.sandboxes import SandboxFactory, pick
from nanoswe_evalkit.sandboxes.base import MIB
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import Task

RAY_OPTIONS = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": "SPREAD"}


@asynccontextmanager
async def local_trials(work: Path, recipe: Recipe, api_key: str) -> AsyncIterator[tuple[str, Run]]:
    """(the kind of sandbox, what runs a trial in it); `work` is gone afterwards."""
    with ExitStack() as stack:
        work.mkdir(parents=True, exist_ok=True)
        folder = os.open(work, os.O_RDONLY)
        stack.callback(os.close, folder)
        stack.enter_context(alone(folder, work))  # another run's sandboxes may be in it
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        kind = await pick(recipe.sandbox.kind, work)
        mirror = _mirror(recipe.tasks.path, recipe.tasks.mirror)
        sandboxes = SandboxFactory(kind, work, mirror, recipe.sandbox.limits())
        model = recipe.model.config(recipe.seed, api_key)
        grade = SharedVerdicts(work).grade if recipe.eval.share_verdicts else grade_patch
        agent = make_agent(recipe.agent)
        parts: dict[str, Any] = {"agent": agent, "sandboxes": sandboxes, "model": model}
        try:
            if isinstance(agent, RunnerAgent):
                await agent.start()
            yield kind, partial(run_trial, grade=grade, **parts)
        finally:
            await agent.close()


@asynccontextmanager
async def ray_trials(recipe: Recipe, api_key: str) -> AsyncIterator[tuple[str, Run]]:
    """(the kind of sandbox, what runs a trial on some node)"""
    try:
        import ray

        ours = not ray.is_initialized()  # the trainer may have its ranks there
        ray.init("auto", log_to_driver=False, ignore_reinit_error=True)
    except ImportError as error:
        raise EvalkitError("ray is not installed: nanoswe-evalkit[ray]") from error
    except ConnectionError as error:
        raise EvalkitError("no Ray cluster; `ray start --head`, or set RAY_ADDRESS") from error
    there = ray.remote(**RAY_OPTIONS)(_run_there)

    async def run(task: Task, attempt: int, **names: Any) -> Trial:
        nodes = (node["Resources"] for node in ray.nodes() if node["Alive"])
        if (need := task.memory_mb * MIB) > max(node.get("memory", 0) for node in nodes):
            raise EvalkitError(f"ray: no node has {task.memory_mb} MB")
        job = there.options(memory=need or None)
        try:
            return await job.remote(recipe, api_key, Path.cwd(), task, attempt, names)
        except ray.exceptions.RayError as error:
            text = " ".join(str(getattr(error, "cause", error)).split())
            raise EvalkitError(f"ray: {text[:500]}") from error

    try:
        yield recipe.sandbox.kind, run
    finally:
        if ours:
            ray.shutdown()


def _run_there(recipe: Recipe, key: str, cwd: Path, task: Task, attempt: int, names: Any) -> Trial:
    with suppress(FileNotFoundError):  # relative paths are then the node's own
        os.chdir(cwd)
    loop, (_, run), *_ = _process(recipe, key)
    return loop.run(run(task, attempt, **names))


@cache
def _process(recipe: Recipe, api_key: str) -> tuple[asyncio.Runner, tuple[str, Run], Any, Any]:
    """What the trials of one of a node's processes share, for as long as it lives."""
    loop, folder = asyncio.Runner(), tempfile.TemporaryDirectory(prefix="nanoswe-")
    scope = local_trials(Path(folder.name) / "work", recipe, api_key)
    return loop, loop.run(scope.__aenter__()), scope, folder


def make_agent(section: AgentSection) -> Agent:
    match section.kind:
        case "openhands" | "mini" as kind:
            python = section.python or Path(f".{kind}/bin/python")
            return RunnerAgent(kind, python, section.model_dump(exclude={"python", "command"}))
        case "command":
            return CommandAgent(section.command, section.max_turns)
        case "nano":
            return NanoAgent(section.max_turns)
        case kind:
            return OracleAgent() if kind == "oracle" else NopAgent()


def _mirror(tasks: Path, mirror: Path | None) -> Path | None:
    """The named mirror, or the one beside the tasks folder, if there is one."""
    beside = [folder / "mirror" for folder in (tasks, *tasks.resolve().parents[:2])]
    found = next(filter(Path.is_dir, [mirror] if mirror else beside), None)
    if mirror and not found:
        raise EvalkitError(f"{mirror}: no such mirror folder; set tasks.mirror")
    return found
