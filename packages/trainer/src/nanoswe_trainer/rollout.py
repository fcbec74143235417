"""Trials through the real parts: tasks in; trials and their sealed trajectories, in (task, attempt)
order, out.

One `Rollouts` is the lifetime of the proxy's server in front of an engine, the agent and the
sandboxes. The agent knows only a base URL; each try at a trial has a proxy session of its own, and
the last try's trajectory counts.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from nanoswe_evalkit.place import local_trials, ray_trials
from nanoswe_evalkit.runner import Gate, Run, read_trials, run_trials
from nanoswe_evalkit.trial import Trial, to_line
from nanoswe_harbor.task import Task
from nanoswe_proxy.app import serve
from nanoswe_proxy.engine.base import Engine
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.trajectory import Trajectory
from nanoswe_trainer.recipe import TrainRecipe

RECEIVED = ("delivered", "acknowledged")


class Rollouts:
    """Made by `open_rollouts`."""

    def __init__(self, recipe: TrainRecipe, proxy: Proxy, run: Run):
        self.recipe, self._proxy, self._run = recipe, proxy, run
        self._gate = Gate(recipe.eval.concurrency, recipe.eval.memory_mb)

    async def run(
        self, tasks: Sequence[Task], attempts: int, prefix: str, *, temperature: float,
        on_trial: Callable[[Trial], None] | None = None, path: Path | None = None,
        trajectories_path: Path | None = None,
    ) -> tuple[list[Trial], dict[str, Trajectory]]:  # fmt: skip
        """`attempts` trials of each task, named `{prefix}.{task}.{attempt}`.

        With `path`, trials that it holds are not run again (and have no trajectory in the answer).
        """
        sealed: dict[str, Trajectory] = {}
        caps: dict[tuple[str, int], str] = {}

        async def open_session(trial_id: str, try_: int) -> str:
            cap = self._proxy.open(
                trial_id, try_, seed_key=f"{self.recipe.seed}/{trial_id}", temperature=temperature,
                max_tokens=self.recipe.model.max_tokens,
            )  # fmt: skip
            caps[trial_id, try_] = cap
            return self._proxy.base_url(cap)

        async def close_session(trial_id: str, try_: int) -> int:
            trajectory = await self._proxy.seal(caps.pop((trial_id, try_)))
            sealed[trial_id] = trajectory
            if trajectories_path:
                with trajectories_path.open("a", encoding="utf-8") as file:
                    file.write(trajectory.to_json() + "\n")
            return sum(turn.delivery in RECEIVED for turn in trajectory.turns)

        trials = await run_trials(
            tasks, attempts, run=self._run, gate=self._gate,
            open_session=open_session, close_session=close_session,
            trial_id=lambda task, attempt: f"{prefix}.{task.task_id}.{attempt}",
            on_trial=on_trial, path=path,
        )  # fmt: skip
        return trials, sealed


@asynccontextmanager
async def open_rollouts(
    recipe: TrainRecipe, engine: Engine, renderer: Renderer, sandbox_kind: str, work: Path
) -> AsyncIterator[Rollouts]:
    """Start proxy and agent in front of an engine; stop them whatever happens. Trials run here, or
    as tasks of a Ray cluster.
    """
    sandbox = recipe.sandbox.model_copy(update={"kind": sandbox_kind})
    recipe = recipe.model_copy(update={"sandbox": sandbox})
    on_ray, proxy = recipe.cluster.backend == "ray", Proxy(engine, renderer)
    place = ray_trials(recipe, "") if on_ray else local_trials(work, recipe, "")
    async with place as (_, run), serve(proxy):
        yield Rollouts(recipe, proxy, run)


def append_records(
    run_dir: Path, trials: Sequence[Trial], trajectories: dict[str, Trajectory]
) -> None:
    """Write a finished step's records in (task, attempt) order."""
    with (run_dir / "trials.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(map(to_line, trials))
    with (run_dir / "trajectories.jsonl").open("a", encoding="utf-8") as file:
        sealed = (trajectories[t.trial_id] for t in trials if t.trial_id in trajectories)
        file.writelines(trajectory.to_json() + "\n" for trajectory in sealed)


def keep_finished(run_dir: Path) -> None:
    """Drop the trajectories, a torn line too, of trials not recorded: they run again."""
    trials, path = run_dir / "trials.jsonl", run_dir / "trajectories.jsonl"
    if not path.exists():
        return
    finished = {t.trial_id for t in read_trials(trials)} if trials.exists() else set()
    whole = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    kept = [line for line in whole if json.loads(line)["trial_id"] in finished]
    path.with_suffix(".tmp").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)
