"""SFT, start to end: demonstrations or found transcripts in, a warmed-up policy out.

Stateless: the batch of a step is a function of the recipe and the step, so resuming is loading and
going on. Left out: packing by length, evaluation loss (of demonstrations, the evaluation that
follows runs the real thing).
"""

import itertools
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nanoswe_evalkit.recipe import dump_recipe
from nanoswe_evalkit.tracker import Tracker
from nanoswe_proxy.render.base import Encoded, Renderer
from nanoswe_trainer import checkpoint, tiny
from nanoswe_trainer.data import demonstrations, render, sft_rows
from nanoswe_trainer.model import load_decoder, save_decoder
from nanoswe_trainer.recipe import TrainRecipe, digest
from nanoswe_trainer.transcripts import Example, TranscriptError, examples
from nanoswe_trainer.view import View
from nanoswe_trainer.worker import Worker, nll

logger = logging.getLogger(__name__)


def rate(step: int, steps: int, warmup_steps: int, decay: float) -> float:
    """Linear warm-up, flat, then a linear fall to a twentieth over the last `decay` of steps."""
    up = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    down = min(1.0, max(0.05, (steps - step) / (decay * steps))) if decay else 1.0
    return up * down


def found(recipe: TrainRecipe, renderer: Renderer) -> list[Example]:
    """What `sft.data` holds, cut to the context; what is left out is logged, with the reason."""
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
    if not kept:
        files = ", ".join(map(str, recipe.sft.data))
        raise TranscriptError(f"sft.data: nothing to learn from in {files}")
    return kept


def _batches(
    recipe: TrainRecipe, renderer: Renderer, first_step: int
) -> Iterator[list[list[Encoded]]]:
    """From `first_step` on. Found records come in a new order each time round."""
    size = recipe.sft.batch
    if not recipe.sft.data:
        shown = demonstrations(recipe.sft.steps * size, recipe.seed, recipe.sft.wrong)
        shown = itertools.islice(shown, first_step * size, None)
        while cases := list(itertools.islice(shown, size)):
            yield [render(renderer, case, expression) for case, expression in cases]
        return
    kept = found(recipe, renderer)
    order: list[Example] = []
    for epoch in itertools.count():
        order += random.Random(f"sft/{recipe.seed}/{epoch}").sample(kept, len(kept))
        while len(order) >= size:
            batch, order = [list(example.parts) for example in order[:size]], order[size:]
            first_step -= 1
            if first_step < 0:
                yield batch


def train_sft(
    recipe: TrainRecipe, worker: Worker, renderer: Renderer, first_step: int,
    after_step: Callable[[int, dict[str, float]], None],
) -> None:  # fmt: skip
    """From `first_step` on; `after_step(steps done, metrics)` may save, show and stop."""
    sft = recipe.sft
    batches = _batches(recipe, renderer, first_step)
    for step in range(first_step, sft.steps):
        began = time.monotonic()
        rows = sft_rows(next(batches), sft.context_weight)
        metrics = worker.step(rows, nll, rate=rate(step, sft.steps, sft.warmup_steps, sft.decay))
        tokens = sum(len(row.tokens) for row in rows)
        metrics |= {"tokens": tokens, "tokens_per_sec": tokens / (time.monotonic() - began)}
        after_step(step + 1, metrics)


def finetune(recipe: TrainRecipe, folder: Path, view: View) -> Path:
    """SFT on found transcripts alone, in this process; answers the exported model's folder.

    Resumes from `folder`/checkpoints. masks.txt there shows what of the first records is learned.
    """
    sft, base = recipe.sft, recipe.init or folder / "model"
    if not recipe.init and not (base / "config.json").exists():
        tiny.create(base, recipe.seed)
    torch.set_num_threads(recipe.cluster.train_threads)
    renderer, decoder = Renderer(base), load_decoder(base)
    position, state = checkpoint.load(folder / "checkpoints", digest(recipe)) or (
        checkpoint.Position("sft", 0), {})  # fmt: skip
    kept = found(recipe, renderer)
    (folder / "masks.txt").write_text("\n".join(_shown(e, renderer) for e in kept[:3]))
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    worker = Worker(decoder, learning_rate=sft.learning_rate, bf16=recipe.cluster.bf16,
                    muon_learning_rate=sft.muon_learning_rate,
                    max_tokens=recipe.cluster.max_tokens)  # fmt: skip
    checkpoint.truncate(folder, {"metrics.jsonl": 0} | position.sizes)
    if state:
        worker.load(state)
    view.stage(f"SFT on {len(kept)} records", sft.steps, position.step)
    config = recipe.model_dump(mode="json")
    with Tracker(folder, recipe.name, config, wandb=recipe.eval.tracker == "wandb") as tracker:

        def after_step(done: int, metrics: dict[str, float]) -> None:
            tracker.log({"stage": "sft", **metrics}, done)
            view.numbers(metrics)
            view.advance(done)
            if done % recipe.train.checkpoint_steps == 0 or done == sft.steps:
                sizes = {"metrics.jsonl": (folder / "metrics.jsonl").stat().st_size}
                at = checkpoint.Position("sft", done, sizes)
                checkpoint.save(folder / "checkpoints", at, worker.state(), digest(recipe))

        train_sft(recipe, worker, renderer, position.step, after_step)
    save_decoder(decoder, folder / "export")
    for pattern in ("tokenizer*", "chat_template*", "generation_config.json"):
        for file in base.glob(pattern):
            shutil.copy(file, folder / "export")
    return folder / "export"


def _shown(example: Example, renderer: Renderer) -> str:
    """Text in which what is learned stands between ⟦ and ⟧."""
    parts = [(renderer.codec.decode(p.ids), "s" in p.provenance) for p in example.parts]
    text = "".join(f"⟦{text}⟧" if learned else text for text, learned in parts)
    return f"==== {example.name}, reward {example.reward}\n{text}\n"
