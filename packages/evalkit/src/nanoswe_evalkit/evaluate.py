"""What the commands do: run a recipe, grade a run again.

In: a recipe and a run folder. Out: the run folder's files (recipe.yaml, trials.jsonl,
metrics.jsonl, the certificates that hold here, with a proxy trajectories.jsonl) and a summary with
avg@k and pass@k, over all tasks and over certified ones, beside the count of trials without a
reward. Refuses (EvalkitError) a run folder that holds another recipe, and an agent without a model.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from nanoswe_evalkit import passk
from nanoswe_evalkit.grading import judge_logs
from nanoswe_evalkit.outcome import EvalkitError, reward_of
from nanoswe_evalkit.place import local_trials, ray_trials
from nanoswe_evalkit.recipe import EvalRecipe, dump_recipe, load_recipe
from nanoswe_evalkit.runner import Gate, read_trials, run_trials
from nanoswe_evalkit.sandboxes import pick
from nanoswe_evalkit.sandboxes.base import SandboxError
from nanoswe_evalkit.sessions import proxy_sessions
from nanoswe_evalkit.tracker import Tracker, progress
from nanoswe_evalkit.trial import Trial, to_line
from nanoswe_evalkit.verify import (
    CERTIFICATES,
    certificate_line,
    certificates,
    place_of,
    read_certificates,
)
from nanoswe_harbor.instance import HarborError
from nanoswe_harbor.task import load_tasks


async def _lacks(recipe: EvalRecipe) -> list[str]:
    """What must be there first, and is not: all of it at once."""
    model, kind, lacks = recipe.model, recipe.agent.kind, list[str]()
    if kind not in ("oracle", "nop") and not (model.base_url or model.proxy):
        lacks.append(f"agent {kind} needs model.base_url=http://HOST:PORT/v1")
    try:
        load_tasks(recipe.tasks.path)
    except HarborError as error:
        lacks.append(str(error))
    if lacks and recipe.cluster.backend == "local":  # else it is found when it is opened
        try:
            with TemporaryDirectory() as work:
                await pick(recipe.sandbox.kind, Path(work))
        except SandboxError as error:
            lacks.append(str(error))
    return lacks


async def evaluate(recipe: EvalRecipe, folder: Path, console: Console, key: str) -> dict[str, Any]:
    """Run or resume the recipe in `folder`; the summary."""
    if lacks := await _lacks(recipe):
        raise EvalkitError("; ".join(lacks))
    if recipe.agent.kind == "command" and not recipe.agent.command:
        raise EvalkitError("agent command needs agent.command, what is run in the sandbox")
    if recipe.agent.kind == "command" and recipe.sandbox.kind == "daytona":
        raise EvalkitError("no agent lives inside daytona; choose bwrap or docker for it")
    if recipe.cluster.backend == "ray" and recipe.sandbox.kind == "auto":
        raise EvalkitError("with ray set sandbox.kind: all nodes use the same")
    if max(recipe.eval.k) > recipe.eval.attempts:
        raise EvalkitError("eval.k asks for more than eval.attempts; raise eval.attempts")
    tasks, attempts = recipe.tasks.chosen(load_tasks(recipe.tasks.path)), recipe.eval.attempts
    total, least = len(tasks) * attempts, passk.detectable_difference(len(tasks), attempts)
    tells = f"two such runs tell differences of {least:.1%}" if least < 1 else "too few to compare"
    async with AsyncExitStack() as stack:
        places: Any = {"local": partial(local_trials, folder / "work"), "ray": ray_trials}
        place = places[recipe.cluster.backend](recipe, key)
        kind, run = await stack.enter_async_context(place)
        trajectories = folder / "trajectories.jsonl"
        sessions = proxy_sessions(recipe, trajectories) if recipe.model.proxy else {}
        held = certificates(tasks, recipe.tasks.path, place_of(kind, recipe)).values()
        certified = {each.task_id for each in held if each.verdict == "certified"}
        _claim(folder, recipe)
        (folder / CERTIFICATES).write_text("".join(map(certificate_line, held)), encoding="utf-8")
        config, wandb = recipe.model_dump(mode="json"), recipe.eval.tracker == "wandb"
        tracker = stack.enter_context(Tracker(folder, recipe.name, config, wandb=wandb))
        console.print(f"{total} trials: {tells}")
        advance = stack.enter_context(progress(console, f"{recipe.name} ({kind})", total))
        trials = await run_trials(
            tasks, attempts, run=run, base_url=recipe.model.base_url, on_trial=advance,
            gate=Gate(recipe.eval.concurrency, recipe.eval.memory_mb),
            path=folder / "trials.jsonl", settings=_settings(recipe), **sessions
        )  # fmt: skip
        summary = summarize(trials, recipe.eval.k, recipe.seed, certified)
        tracker.log({name: e["value"] for name, e in summary["scores"].items()})
        tracker.finish(trials, {k: v for k, v in summary.items() if k != "task_counts"})
    return summary


def _settings(recipe: EvalRecipe) -> str:
    """A digest of all that makes a trial another trial; not of where the model's service is."""
    address = {"model": {"base_url", "proxy", "timeout_sec"}}
    told = recipe.model_dump_json(include={"seed", "agent", "sandbox", "model"}, exclude=address)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def summarize(
    trials: Sequence[Trial], ks: Sequence[int], seed: int, certified: Collection[str] = ()
) -> dict[str, Any]:
    """Scores with intervals, and what they leave out; too much of that, and there is no headline.

    `strict` counts trials without a reward as not resolved; all else leaves them out.
    """
    counts, missing = passk.counts_of(trials), sum(trial.reward is None for trial in trials)
    tasks = {trial.task_id for trial in trials}
    scores: dict[str, passk.Estimate | None] = {}
    headline, without = None, passk.no_headline(trials)
    if counts:
        name, most = f"avg@{max(t.attempt for t in trials) + 1}", max(n for n, _ in counts.values())
        scores[name] = valid = passk.avg_at_k(counts)
        scores |= {f"pass@{k}": passk.pass_estimate(counts, k) for k in ks if k <= most}
        scores[f"{name} strict"] = passk.avg_at_k(passk.counts_of(trials, strict=True))
        scores[f"{name} by repository"] = passk.by_repository(counts, seed)
        if sound := {task: count for task, count in counts.items() if task in certified}:
            scores[f"{name} certified"] = passk.avg_at_k(sound)
        if not without:
            headline = f"{valid.value:.1%} [{valid.low:.1%}, {valid.high:.1%}]"
    return {
        "headline": headline, "no_headline": without, "tasks": len(tasks),
        "certified": len(tasks & set(certified)), "task_counts": counts,
        "scores": {name: asdict(score) for name, score in scores.items() if score},
        "outcomes": dict(Counter(str(trial.outcome) for trial in trials).most_common()),
        "trials": len(trials), "no_reward": missing, "infra_rate": missing / max(len(trials), 1)
    }  # fmt: skip


def regrade_run(folder: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Judge each stored log again. (the trials whose verdict changed, the summary of all)"""
    recipe = load_recipe(folder / "recipe.yaml", [], EvalRecipe)
    tasks = {task.task_id: task for task in load_tasks(recipe.tasks.path)}
    held = {c.task_id for c in read_certificates(folder) if c.verdict == "certified"}
    changed, graded = [], []
    for old in read_trials(folder / "trials.jsonl"):
        if not (report := old.report or {}).get("runs"):
            graded.append(old)
            continue
        if old.task_id not in tasks:
            raise EvalkitError(f"{recipe.tasks.path}: has no task {old.task_id}; restore the tasks")
        verdict = judge_logs(tasks[old.task_id], report["runs"], report["dropped"])
        ends: Any = {"outcome": verdict.outcome, "reward": reward_of(verdict.outcome)}
        graded.append(replace(old, report=verdict.report, **ends))
        change = {"before": str(old.outcome), "after": str(verdict.outcome)}
        changed += [{"trial_id": old.trial_id, **change}] * (old.outcome != verdict.outcome)
    (folder / "regraded.jsonl").write_text("".join(map(to_line, graded)), encoding="ascii")
    return changed, summarize(graded, recipe.eval.k, recipe.seed, held)


def _claim(folder: Path, recipe: EvalRecipe) -> None:
    """Write recipe.yaml, or make sure that the folder's own says the same."""
    path, text = folder / "recipe.yaml", dump_recipe(recipe)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        raise EvalkitError(f"{path} is of another recipe; choose another name=, or remove {folder}")
