"""GRPO, start to end: tasks with real tests in, a better policy out.

A step takes `groups` groups of trials, one group a task, turns verdicts into advantages and takes
one optimizer step on exactly the tokens that were sampled. `sched` decides which groups: with
`depth` 0 all of them are sampled by the present weights, and the same recipe gives the same
numbers, killed and resumed or not; with more, sampling runs ahead of training by a bounded number
of versions. Groups are numbered: group n tries task n, round and round, and a batch is in the order
of its groups. Left out, on purpose: several updates a batch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.task import Task
from nanoswe_proxy.trajectory import Trajectory
from nanoswe_trainer.algo import policy_loss
from nanoswe_trainer.data import GroupBatch, rl_rows
from nanoswe_trainer.engine.copied import CopiedEngine
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.metrics import ages, rollout_metrics
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.rollout import Rollouts
from nanoswe_trainer.sched import Schedule
from nanoswe_trainer.worker import Worker

Sealed = dict[str, Trajectory]
log = logging.getLogger(__name__)
STALL_SEC = 600.0
WARMUP_STEPS = 4  # AdamW's averages are young
TrainedEngine = LocalEngine | CopiedEngine


@dataclass(frozen=True)
class Step:
    """What a step did; `ledger` is what a resume needs to lose no group and train none twice."""

    done: int
    metrics: dict[str, float]
    trials: list[Trial]
    trajectories: Sealed
    ledger: dict[str, Any]


@dataclass
class _Groups:
    """The groups under way and those that have ended, under the schedule's rule."""

    plan: Schedule
    following: int  # the next group that was never admitted
    again: list[int]  # admitted by a run that was killed
    ended: dict[int, tuple[list[Trial], Sealed]] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def ledger(self) -> dict[str, Any]:
        return {"following": self.following, "live": sorted({*self.plan.live, *self.again})}

    def admit(self, start: Callable[[int], object], steps: int) -> None:
        """Start as many as the schedule has room for and the remaining steps have use for."""
        plan = self.plan
        while plan.may_admit and len(plan.live) < (steps - plan.version) * plan.per_step:
            group = self.again.pop(0) if self.again else self.following
            self.following = max(self.following, group + 1)
            plan.admit(group)
            start(group)


async def train_rl(
    recipe: TrainRecipe, worker: Worker, engine: TrainedEngine, rollouts: Rollouts,
    tasks: Sequence[Task], first_step: int, ledger: dict[str, Any] | None,
    after_step: Callable[[Step], None], on_trial: Callable[[Trial], None],
) -> None:  # fmt: skip
    """From `first_step` on; `after_step` records and saves."""
    train = recipe.train
    known = ledger or {"following": first_step * train.groups, "live": []}
    groups = _Groups(
        Schedule(train.groups, train.depth, train.max_age or 2 * train.depth, first_step),
        known["following"], list(known["live"]),
    )  # fmt: skip

    async def run(group: int) -> None:
        groups.ended[group] = await rollouts.run(
            [tasks[group % len(tasks)]], train.group_size, f"s{group // train.groups:05}",
            temperature=recipe.model.temperature, on_trial=on_trial,
        )  # fmt: skip
        groups.plan.finish(group)
        groups.news.set()

    async with asyncio.TaskGroup() as running:
        for step in range(first_step, train.steps):
            began, generated = time.monotonic(), engine.generated
            groups.admit(lambda group: running.create_task(run(group)), train.steps)
            while not groups.plan.full:
                groups.news.clear()
                try:
                    await asyncio.wait_for(groups.news.wait(), STALL_SEC)
                except TimeoutError:  # a trial's own limits end it; who waits asks for whom
                    blocking = sorted(groups.plan.live.keys() - groups.ended.keys())
                    names = ", ".join(tasks[g % len(tasks)].task_id for g in blocking)
                    log.warning("step %d waits for trials of %s", step + 1, names)
            waited = time.monotonic() - began
            ended = [groups.ended.pop(group) for group in sorted(groups.plan.batch)]
            trials = [trial for group, _ in ended for trial in group]
            trajectories = {name: t for _, sealed in ended for name, t in sealed.items()}
            batch = rl_rows(
                [group for group, _ in ended], trajectories, train, recipe.cluster.max_context
            )
            metrics = rollout_metrics(trials, batch) | ages(trajectories.values(), engine.version)
            metrics |= await engine.update(partial(_update, recipe, worker, batch, step))
            groups.plan.trained()
            took = time.monotonic() - began
            metrics |= {
                "step_sec": took, "wait_sec": waited, "trials_per_sec": len(trials) / took,
                "tokens_per_sec": (engine.generated - generated) / took,
            }  # fmt: skip
            after_step(Step(step + 1, metrics, trials, trajectories, groups.ledger()))


def _update(recipe: TrainRecipe, worker: Worker, batch: GroupBatch, step: int) -> dict[str, float]:
    train = recipe.train
    if not batch.rows:  # nothing to learn from: the next version is the same policy
        return {}
    torch.set_num_threads(recipe.cluster.train_threads)
    loss = partial(policy_loss, train=train)
    rate = min(1.0, (step + 1) / WARMUP_STEPS)
    try:
        return worker.step(batch.rows, loss, rate=rate, temperature=recipe.model.temperature)
    finally:
        torch.set_num_threads(1)
