"""One run, start to end: a recipe and a folder in; trained weights, records and a report in that
folder out.

The stages are SFT, an evaluation, RL, the same evaluation again. Each is left out when the recipe
gives it no steps, and skipped when the checkpoint says that it is done: a killed run goes on where
it was. SFT on found transcripts alone needs no tasks and has no evaluation. Refuses a folder made
by another recipe.
"""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.passk import counts_of, paired_difference
from nanoswe_evalkit.recipe import dump_recipe
from nanoswe_evalkit.runner import read_trials
from nanoswe_evalkit.tracker import Tracker
from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.task import Task, load_tasks
from nanoswe_proxy.render.base import Renderer
from nanoswe_trainer import checkpoint, tiny
from nanoswe_trainer.cluster import open_ranks
from nanoswe_trainer.engine.copied import serve_copy
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.engine.vllm import serve_vllm
from nanoswe_trainer.loop_rl import Step, TrainedEngine, train_rl
from nanoswe_trainer.loop_sft import show_masks, train_sft
from nanoswe_trainer.metrics import alarms, eval_metrics
from nanoswe_trainer.recipe import TrainRecipe, digest
from nanoswe_trainer.rollout import Rollouts, append_records, keep_finished, open_rollouts
from nanoswe_trainer.view import View
from nanoswe_trainer.worker import Worker

T = TypeVar("T")
STAGES = ("sft", "eval_before", "rl", "eval_after", "done")
RECORDS = ("trials.jsonl", "trajectories.jsonl", "metrics.jsonl")


@dataclass(frozen=True)
class Summary:
    """`eval_metrics`, sampled and greedy; gains: value, low, high. Without RL there are none."""

    before: dict[str, dict[str, Any]]
    after: dict[str, dict[str, Any]]
    gains: dict[str, tuple[float, float, float]]


class Run:
    """What the stages share. This process computes on the one thread of `compute`: no races."""

    worker: Worker  # set by `train`

    def __init__(
        self, recipe: TrainRecipe, folder: Path, sandbox_kind: str, tracker: Tracker, view: View
    ):
        self.recipe, self.folder, self.sandbox_kind = recipe, folder, sandbox_kind
        self.tracker, self.view = tracker, view
        self.compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self.tasks: list[Task] = []
        self.heldout: list[Task] = []
        if recipe.has_trials:
            self.tasks = recipe.tasks.chosen(load_tasks(recipe.tasks.path))
            heldout = load_tasks(recipe.tasks.path.parent / recipe.train.heldout)
            self.heldout = recipe.tasks.chosen(heldout)
        self.model_dir = recipe.init or folder / "model"
        if not recipe.init and not (self.model_dir / "config.json").exists():
            tiny.create(self.model_dir, recipe.seed)
        self.renderer = Renderer(self.model_dir)
        tokens = self.renderer.codec.full
        every = range(tokens.get_vocab_size())
        texts = [tokens.decode([i], skip_special_tokens=False) for i in every]
        (folder / "tokens.json").write_text(json.dumps(texts))
        self.checkpoints = folder / "checkpoints"
        self.digest = digest(recipe, [*self.tasks, *self.heldout])
        found = checkpoint.load(self.checkpoints, self.digest)
        self.position, state = found or (checkpoint.Position(STAGES[0], 0), {})
        self.ledger, self.resumes = state.get("ledger"), bool(found)
        # records of a step that no checkpoint holds are made again; an evaluation goes on
        sizes = dict.fromkeys(RECORDS, 0) | self.position.sizes
        if self.position.stage.startswith("eval"):
            keep_finished(folder)
            sizes = {"metrics.jsonl": sizes["metrics.jsonl"]}
        checkpoint.truncate(folder, sizes)
        if found:
            view.note(f"resuming {folder} at {self.position.stage}, step {self.position.step}")

    async def in_compute(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.compute, function, *arguments)

    def pending(self, stage: str) -> int | None:
        """The step at which `stage` starts, or None when it is behind us."""
        if STAGES.index(stage) < STAGES.index(self.position.stage):
            return None
        return self.position.step if stage == self.position.stage else 0

    def save(self, stage: str, step: int, optimizers: bool = True, **extra: Any) -> None:
        sizes = {n: (self.folder / n).stat().st_size for n in RECORDS if (self.folder / n).exists()}
        self.position = checkpoint.Position(stage, step, sizes)
        self.worker.save(self.checkpoints, self.position, self.digest, extra, optimizers)

    def finish(self, stage: str) -> None:
        self.save(STAGES[STAGES.index(stage) + 1], 0, optimizers=False)

    def begin(self, stage: str, **settings: Any) -> None:
        """Optimizers, where the checkpoint left them."""
        self.worker.begin(**settings)
        if self.position.stage == stage and self.position.step:
            self.worker.load(self.checkpoints, self.digest, optimizers=True)


async def sft_stage(run: Run) -> None:
    recipe, first = run.recipe, run.pending("sft")
    if first is None:
        return
    if not recipe.sft.steps:
        run.finish("sft")
        return
    rates = recipe.sft.learning_rate, recipe.sft.muon_learning_rate
    run.begin("sft", learning_rate=rates[0], muon_learning_rate=rates[1])
    if recipe.sft.data:
        (run.folder / "masks.txt").write_text(show_masks(recipe, run.renderer))
    run.view.stage("SFT", recipe.sft.steps, first)
    await run.in_compute(torch.set_num_threads, recipe.cluster.train_threads)
    steps = train_sft(recipe, run.worker, run.renderer, first)
    while (step := await run.in_compute(next, steps, None)) is not None:
        done, metrics = step
        run.tracker.log({"stage": "sft", **metrics}, done)
        run.view.numbers(metrics)
        run.view.advance(done)
        if done % recipe.train.checkpoint_steps == 0 and done < recipe.sft.steps:
            run.save("sft", done)
    run.finish("sft")


async def eval_stage(run: Run, stage: str, step: int, rollouts: Rollouts) -> dict[str, list[Trial]]:
    """avg@k as trained and one greedy attempt a held-out task; trials by sampled and greedy."""
    recipe, name = run.recipe, stage.removeprefix("eval_")
    kinds = {
        "sampled": ("e", recipe.model.temperature, recipe.eval.attempts),
        "greedy": ("g", 0.0, 1),
    }
    recorded = run.folder / "trials.jsonl"
    if run.pending(stage) is None:
        old = read_trials(recorded)
        prefixes = {k: f"{letter}{step:05}." for k, (letter, _, _) in kinds.items()}
        return {k: [t for t in old if t.trial_id.startswith(p)] for k, p in prefixes.items()}
    run.view.stage(f"evaluate {name}", len(run.heldout) * (recipe.eval.attempts + 1))
    results = {}
    for kind, (letter, temperature, attempts) in kinds.items():
        began = time.monotonic()

        def on_trial(trial: Trial) -> None:
            run.view.advance()
            run.view.trial(trial)

        trials, _ = await rollouts.run(
            run.heldout, attempts, f"{letter}{step:05}", temperature=temperature, on_trial=on_trial,
            path=recorded, trajectories_path=run.folder / "trajectories.jsonl",
        )  # fmt: skip
        if all(trial.reward is None for trial in trials):
            text = f"no trial could be judged; the first: {trials[0].error or trials[0].outcome}"
            raise EvalkitError(f"{text}. Put that right and run again: it resumes")
        numbers = eval_metrics(trials, attempts)
        numbers["trials_per_sec"] = len(trials) / (time.monotonic() - began)
        facts = {"stage": "eval", "name": name, "greedy": kind == "greedy"}
        run.tracker.log(facts | numbers, step)
        results[kind] = trials
    run.finish(stage)
    return results


@asynccontextmanager
async def open_engine(run: Run) -> AsyncIterator[TrainedEngine]:
    """The recipe's engine over the run's weights, at the version where RL stands."""
    cluster, at = run.recipe.cluster, run.pending("rl")
    version = run.recipe.train.steps if at is None else at
    facts: dict[str, Any] = {
        "slots": run.recipe.eval.concurrency, "max_context": cluster.max_context,
        "bf16": cluster.bf16, "compute": run.compute,
    }  # fmt: skip
    weights, on_ray = run.folder / "weights", cluster.backend == "ray"
    if cluster.engine == "vllm":
        vllm = cluster.vllm, cluster.vllm_options
        async with serve_vllm(run.worker, weights, *vllm, version=version, **facts) as served:
            yield served
    elif on_ray or not isinstance(run.worker, Worker):
        facts |= {"on_ray": on_ray, "version": version}
        async with serve_copy(run.worker, weights, **facts) as copy:
            yield copy
    else:
        engine = LocalEngine(run.worker.decoder, **facts)
        engine.version = version
        yield engine


async def rl_stage(run: Run, engine: TrainedEngine, rollouts: Rollouts) -> None:
    recipe, first = run.recipe, run.pending("rl")
    if first is None:
        return
    train = recipe.train
    teacher = train.teacher and train.teacher.absolute()
    reference = run.folder / "reference" if train.kl else teacher
    if train.kl and not first:
        await run.in_compute(run.worker.export, run.folder / "reference")
    run.begin("rl", reference=reference, learning_rate=train.learning_rate)
    run.view.stage("RL (GRPO)", train.steps, first)

    def after_step(step: Step) -> None:
        append_records(run.folder, step.trials, step.trajectories)
        run.tracker.log({"stage": "rl", **step.metrics}, step.done)
        run.view.numbers(step.metrics)
        run.view.alarm(alarms(step.metrics))
        run.view.advance(step.done)
        if step.done % train.checkpoint_steps == 0 and step.done < train.steps:
            run.save("rl", step.done, ledger=step.ledger)

    ledger = run.ledger if run.position.stage == "rl" else None
    await train_rl(
        recipe, run.worker, engine, rollouts, run.tasks, first, ledger, after_step, run.view.trial
    )
    run.finish("rl")


async def trial_stages(run: Run) -> Summary:
    """What follows SFT."""
    recipe = run.recipe
    await run.in_compute(torch.set_num_threads, 1)
    async with (
        open_engine(run) as engine,
        open_rollouts(
            recipe, engine, run.renderer, run.sandbox_kind, run.folder / "work"
        ) as rollouts,
    ):
        before = await eval_stage(run, "eval_before", 0, rollouts)
        after = before
        if recipe.train.steps:
            await rl_stage(run, engine, rollouts)
            after = await eval_stage(run, "eval_after", recipe.train.steps, rollouts)
    attempts = {"sampled": recipe.eval.attempts, "greedy": 1}
    gains = {}
    for kind in attempts if recipe.train.steps else ():
        gain = paired_difference(counts_of(before[kind]), counts_of(after[kind]), recipe.seed)
        gains[kind] = gain.value, gain.low, gain.high
    first, last = ({k: eval_metrics(e[k], n) for k, n in attempts.items()} for e in (before, after))
    return Summary(first, last, gains)


async def train(recipe: TrainRecipe, folder: Path, sandbox_kind: str, view: View) -> Summary | None:
    """All stages; writes `folder`/{recipe.yaml, *.jsonl, checkpoints/, model/, export/}."""
    config, summary = recipe.model_dump(mode="json"), None
    folder = folder.absolute()  # ranks elsewhere have another working directory
    with Tracker(folder, recipe.name, config, wandb=recipe.eval.tracker == "wandb") as tracker:
        run = Run(recipe, folder, sandbox_kind, tracker, view)
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        with open_ranks(recipe, run.model_dir) as run.worker:
            try:
                if run.resumes:
                    run.worker.load(run.checkpoints, run.digest)
                await sft_stage(run)
                if recipe.has_trials:
                    summary = await trial_stages(run)
            finally:
                # a step of ranks may hang: they are killed next, which ends it
                run.compute.shutdown(wait=isinstance(run.worker, Worker), cancel_futures=True)
            run.worker.export(folder / "export")
        for path in run.model_dir.iterdir():  # the tokenizer's files and the chat template
            target = folder / "export" / path.name
            if path.suffix in (".json", ".jinja", ".model") and not target.exists():
                shutil.copyfile(path, target)
    return summary
