"""SFT, start to end: demonstrations or found transcripts in, a warmed-up policy out.

Stateless: the batch of a step is a function of the recipe and the step, so resuming is loading and
going on. Of eight or more found records every sixteenth is held out, and its loss is measured at
each checkpoint; after demonstrations the evaluation runs the real thing.
"""

import itertools
import logging
import random
import time
from collections.abc import Iterator
from functools import lru_cache

from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.render.types import Encoded
from nanoswe_trainer.data import conversation, demonstrations, sft_rows
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.transcripts import Example, TranscriptError, examples
from nanoswe_trainer.worker import Worker, nll

Batches = Iterator[list[list[Encoded]]]
logger = logging.getLogger(__name__)


def rate(step: int, steps: int, warmup_steps: int, decay: float) -> float:
    """Linear warm-up, flat, then a linear fall to a twentieth over the last `decay` of steps."""
    up = min(1.0, (step + 1) / max(warmup_steps, 1))
    down = min(1.0, max(0.05, (steps - step) / (decay * steps))) if decay else 1.0
    return up * down


@lru_cache(1)
def split(recipe: TrainRecipe, renderer: Renderer) -> tuple[list[Example], list[Example]]:
    """What `sft.data` holds, cut to the context, to learn from and to measure by; what is left out
    is logged, with the reason.
    """
    kept = []
    for example in (e for path in recipe.sft.data for e in examples(path, renderer)):
        parts, room = [], recipe.cluster.max_context
        for part in example.parts:
            parts.append(Encoded(part.ids[:room], part.provenance[:room]))
            room -= len(parts[-1].ids)
        why = example.refused
        if not why and recipe.sft.min_reward and (example.reward or 0.0) < recipe.sft.min_reward:
            why = f"its reward is {example.reward}"
        if not why and not any("s" in part.provenance for part in parts):
            why = f"no reply begins within {recipe.cluster.max_context} tokens"
        if why:
            logger.warning("%s is left out: %s", example.name, why)
        else:
            kept.append(Example(example.name, tuple(p for p in parts if p.ids), example.reward))
    if recipe.sft.data and not kept:
        files = ", ".join(map(str, recipe.sft.data))
        raise TranscriptError(f"sft.data: nothing to learn from in {files}")
    return [e for i, e in enumerate(kept) if i % 16 != 7], kept[7::16]


def _batches(recipe: TrainRecipe, renderer: Renderer, first_step: int) -> Batches:
    """From `first_step` on. Found records come in a new order each time round."""
    size = recipe.sft.batch
    if not recipe.sft.data:
        every = demonstrations(recipe.sft.steps * size, recipe.seed, recipe.sft.wrong)
        every = itertools.islice(every, first_step * size, None)
        while cases := list(itertools.islice(every, size)):
            yield [renderer.render_messages(conversation(*shown), None) for shown in cases]
        return
    kept, _ = split(recipe, renderer)
    order: list[Example] = []
    for epoch in itertools.count():
        order += random.Random(f"sft/{recipe.seed}/{epoch}").sample(kept, len(kept))
        while len(order) >= size:
            batch, order = [list(example.parts) for example in order[:size]], order[size:]
            first_step -= 1
            if first_step < 0:
                yield batch


def train_sft(
    recipe: TrainRecipe, worker: Worker, renderer: Renderer, first_step: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """From `first_step` on: after each step, the steps done and its numbers."""
    sft = recipe.sft
    batches = _batches(recipe, renderer, first_step)
    heldout = sft_rows([list(e.parts) for e in split(recipe, renderer)[1]], sft.context_weight)
    for step in range(first_step, sft.steps):
        began = time.monotonic()
        rows = sft_rows(next(batches), sft.context_weight)
        metrics = worker.step(rows, nll, rate=rate(step, sft.steps, sft.warmup_steps, sft.decay))
        tokens = sum(len(row.tokens) for row in rows)
        metrics |= {"tokens": tokens, "tokens_per_sec": tokens / (time.monotonic() - began)}
        done = step + 1
        if heldout and (done % recipe.train.checkpoint_steps == 0 or done == sft.steps):
            metrics["heldout_loss"] = worker.measure(heldout, nll)["loss"]
        yield done, metrics


def show_masks(recipe: TrainRecipe, renderer: Renderer) -> str:
    """The first records as text in which what is learned stands between ⟦ and ⟧."""
    shown = []
    for example in split(recipe, renderer)[0][:3]:
        parts = [(renderer.codec.decode(p.ids), "s" in p.provenance) for p in example.parts]
        text = "".join(f"⟦{text}⟧" if learned else text for text, learned in parts)
        shown.append(f"==== {example.name}, reward {example.reward}\n{text}\n")
    return "\n".join(shown)
