"""GRPO, start to end: tasks with real tests in, a better policy out.

A step is synchronous: run a group of trials on each of a few tasks, turn verdicts into advantages,
take one optimizer step on exactly the tokens that were sampled, hand the weights to the engine.
Tasks come round in their order; batches are ordered by (task, attempt). So the same recipe gives
the same numbers, killed and resumed or not. Left out, on purpose: asynchrony, a KL model, several
updates a batch.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.task import Task
from nanoswe_proxy.trajectory import Trajectory
from nanoswe_trainer.algo import clip_loss
from nanoswe_trainer.data import GroupBatch, rl_rows
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.metrics import rollout_metrics
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.rollout import Rollouts
from nanoswe_trainer.worker import Worker

AfterStep = Callable[[int, dict[str, float], list[Trial], dict[str, Trajectory]], None]


def tasks_of_step(tasks: Sequence[Task], step: int, groups: int) -> list[Task]:
    """The next `groups` tasks in order, round and round."""
    return [tasks[(step * groups + i) % len(tasks)] for i in range(groups)]


async def train_rl(
    recipe: TrainRecipe, worker: Worker, engine: LocalEngine, rollouts: Rollouts,
    tasks: Sequence[Task], first_step: int, compute: ThreadPoolExecutor, after_step: AfterStep,
    on_trial: Callable[[Trial], None],
) -> None:  # fmt: skip
    """From `first_step` on; `after_step(steps done, metrics, trials, trajectories)` records."""
    train = recipe.train
    for step in range(first_step, train.steps):
        began, generated = time.monotonic(), engine.generated
        chosen = tasks_of_step(tasks, step, train.groups)
        trials, trajectories = await rollouts.run(
            chosen,
            train.group_size,
            f"s{step:05}",
            temperature=recipe.model.temperature,
            on_trial=on_trial,
        )
        sampled_sec = time.monotonic() - began
        groups = [trials[i : i + train.group_size] for i in range(0, len(trials), train.group_size)]
        batch = rl_rows(
            groups, trajectories, advantage=train.advantage, normaliser=train.normaliser,
            truncated=train.truncated, max_length=recipe.cluster.max_context,
        )  # fmt: skip
        metrics = rollout_metrics(trials, batch) | {
            "trials_per_sec": len(trials) / sampled_sec,
            "tokens_per_sec": (engine.generated - generated) / sampled_sec,
        }
        if batch.rows:
            update = partial(_update, recipe, worker, batch, step)
            metrics |= await asyncio.get_running_loop().run_in_executor(compute, update)
            engine.load()
        metrics["step_sec"] = time.monotonic() - began
        after_step(step + 1, metrics, trials, trajectories)


def _update(recipe: TrainRecipe, worker: Worker, batch: GroupBatch, step: int) -> dict[str, float]:
    train = recipe.train
    torch.set_num_threads(recipe.cluster.train_threads)
    loss = partial(clip_loss, clip_low=train.clip_low, clip_high=train.clip_high)
    rate = min(1.0, (step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
    return worker.step(batch.rows, loss, rate=rate, temperature=recipe.model.temperature)
