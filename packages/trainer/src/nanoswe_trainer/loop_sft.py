"""SFT, start to end: demonstrations in, a warmed-up policy out.

Stateless: the batch of a step is a function of the recipe and the step, so resuming is loading and
going on. Left out: packing by length, evaluation loss (the evaluation that follows runs the real
thing).
"""

import itertools
import time
from collections.abc import Callable

from nanoswe_proxy.render.base import Renderer
from nanoswe_trainer.data import demonstrations, render, sft_rows
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.worker import Worker, nll


def rate(step: int, steps: int, warmup_steps: int, decay: float) -> float:
    """Linear warm-up, flat, then a linear fall to a twentieth over the last `decay` of steps."""
    up = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    down = min(1.0, max(0.05, (steps - step) / (decay * steps))) if decay else 1.0
    return up * down


def train_sft(
    recipe: TrainRecipe, worker: Worker, renderer: Renderer, first_step: int,
    after_step: Callable[[int, dict[str, float]], None],
) -> None:  # fmt: skip
    """From `first_step` on; `after_step(steps done, metrics)` may save, show and stop."""
    sft = recipe.sft
    shown = demonstrations(sft.steps * sft.batch, recipe.seed, sft.wrong)
    for step in range(sft.steps):
        batch = list(itertools.islice(shown, sft.batch))
        if step < first_step:
            continue
        began = time.monotonic()
        rows = sft_rows(
            [render(renderer, case, expression) for case, expression in batch], sft.context_weight
        )
        metrics = worker.step(rows, nll, rate=rate(step, sft.steps, sft.warmup_steps, sft.decay))
        tokens = sum(len(row.tokens) for row in rows)
        metrics |= {"tokens": tokens, "tokens_per_sec": tokens / (time.monotonic() - began)}
        after_step(step + 1, metrics)
