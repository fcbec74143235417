"""What the commands do: run a recipe, verify tasks, grade a run again.

In: a recipe and a run folder, or a tasks folder. Out: the run folder's files (recipe.yaml,
trials.jsonl, metrics.jsonl) and a summary with avg@k and pass@k beside the count of trials without
a reward. Refuses (EvalkitError) a run folder that holds another recipe, and an agent without a
model.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nanoswe_evalkit import passk
from nanoswe_evalkit.agents.base import Agent, ModelConfig
from nanoswe_evalkit.agents.command import CommandAgent
from nanoswe_evalkit.agents.nano import NanoAgent
from nanoswe_evalkit.agents.oracle import NopAgent, OracleAgent
from nanoswe_evalkit.agents.runner import RunnerAgent
from nanoswe_evalkit.grading import SharedVerdicts, grade_patch, judge_logs
from nanoswe_evalkit.outcome import EvalkitError, reward_of
from nanoswe_evalkit.recipe import AgentSection, Recipe, dump_recipe, load_recipe
from nanoswe_evalkit.runner import read_trials, run_trials
from nanoswe_evalkit.sandboxes import SandboxFactory, pick
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_evalkit.tracker import Tracker
from nanoswe_evalkit.trial import Trial, to_line
from nanoswe_harbor.task import load_tasks

MAX_INFRA_RATE = 0.01


async def evaluate(recipe: Recipe, folder: Path, console: Console, api_key: str) -> dict[str, Any]:
    """Run or resume the recipe in `folder`; the summary."""
    if recipe.agent.kind not in ("oracle", "nop") and not recipe.model.base_url:
        raise EvalkitError(f"agent {recipe.agent.kind} needs model.base_url, ending in /v1")
    if recipe.agent.kind == "command" and not recipe.agent.command:
        raise EvalkitError("agent command needs agent.command, what is run in the sandbox")
    if max(recipe.eval.k) > recipe.eval.attempts:
        raise EvalkitError("eval.k asks for more than eval.attempts; raise eval.attempts")
    tasks = recipe.tasks.chosen(load_tasks(recipe.tasks.path))
    work, mirror = folder / "work", _mirror(recipe.tasks.path, recipe.tasks.mirror)
    kind = await pick(recipe.sandbox.kind, work)
    _claim(folder, recipe)
    sandboxes = SandboxFactory(kind, work, mirror, recipe.sandbox.limits())
    total, wandb = len(tasks) * recipe.eval.attempts, recipe.eval.tracker == "wandb"
    least = passk.detectable_difference(len(tasks), recipe.eval.attempts)
    console.print(f"{total} trials: two such runs tell differences of {least:.1%} or more apart")
    config = recipe.model_dump(mode="json")
    agent = make_agent(recipe.agent)
    try:
        if isinstance(agent, RunnerAgent):
            await agent.start()
        with (
            Tracker(folder, recipe.name, config, wandb=wandb) as tracker,
            _progress(console, f"{recipe.name} ({kind})", total) as advance,
        ):
            trials = await run_trials(
                tasks, recipe.eval.attempts, agent=agent, sandboxes=sandboxes,
                model=recipe.model.config(recipe.seed, api_key),
                concurrency=recipe.eval.concurrency, base_url=recipe.model.base_url,
                on_trial=advance, path=folder / "trials.jsonl",
                grade=SharedVerdicts().grade if recipe.eval.share_verdicts else grade_patch
            )  # fmt: skip
            summary = summarize(trials, recipe.eval.k, recipe.seed)
            tracker.log({name: e["value"] for name, e in summary["scores"].items()})
            tracker.finish(trials, {k: v for k, v in summary.items() if k != "task_counts"})
    finally:
        await agent.close()
        shutil.rmtree(work, ignore_errors=True)
    return summary


def summarize(trials: Sequence[Trial], ks: Sequence[int], seed: int) -> dict[str, Any]:
    """Scores with intervals, and what they leave out; too much of that, and there is no headline.

    `strict` counts trials without a reward as not resolved; all else leaves them out.
    """
    counts, missing = passk.counts_of(trials), sum(trial.reward is None for trial in trials)
    scores: dict[str, passk.Estimate | None] = {}
    headline, rate = None, missing / max(len(trials), 1)
    if counts:
        name, most = f"avg@{max(t.attempt for t in trials) + 1}", max(n for n, _ in counts.values())
        scores[name] = valid = passk.avg_at_k(counts)
        scores |= {f"pass@{k}": passk.pass_estimate(counts, k) for k in ks if k <= most}
        scores[f"{name} strict"] = passk.avg_at_k(passk.counts_of(trials, strict=True))
        scores[f"{name} by repository"] = passk.by_repository(counts, seed)
        if rate <= MAX_INFRA_RATE:
            headline = f"{valid.value:.1%} [{valid.low:.1%}, {valid.high:.1%}]"
    return {
        "headline": headline, "tasks": len({trial.task_id for trial in trials}),
        "scores": {name: asdict(score) for name, score in scores.items() if score},
        "outcomes": dict(Counter(str(trial.outcome) for trial in trials).most_common()),
        "trials": len(trials), "no_reward": missing, "infra_rate": rate, "task_counts": counts
    }  # fmt: skip


async def verify_tasks(
    path: Path, mirror: Path | None, kind: str, images: str, concurrency: int, console: Console
) -> tuple[list[dict[str, str]], int]:
    """Gold must score 1, and the tests without any patch 0. (the liars, number of tasks)"""
    tasks, liars = load_tasks(path), []
    with tempfile.TemporaryDirectory(prefix="nanoswe-verify-") as folder:
        work = Path(folder)
        limits = Limits(images=images)
        sandboxes = SandboxFactory(await pick(kind, work), work, _mirror(path, mirror), limits)
        checks: dict[str, tuple[Agent, float]] = {"oracle": (OracleAgent(), 1.0)}
        for name, (agent, want) in (checks | {"nop": (NopAgent(), 0.0)}).items():
            with _progress(console, f"verify {name} ({sandboxes.kind})", len(tasks)) as advance:
                trials = await run_trials(
                    tasks, 1, agent=agent, sandboxes=sandboxes, model=ModelConfig("none"),
                    concurrency=concurrency, on_trial=advance, grade_empty=True
                )  # fmt: skip
            for trial in trials:
                why = trial.error or str((trial.report or {}).get("reason", ""))
                liar = {"task_id": trial.task_id, "agent": name, "outcome": str(trial.outcome)}
                liars += [{**liar, "why": why}] if trial.reward != want else []
    return liars, len(tasks)


def regrade_run(folder: Path) -> tuple[list[dict[str, str]], int]:
    """Judge each stored log again. (the trials whose verdict changed, number judged)"""
    recipe = load_recipe(folder / "recipe.yaml", [], Recipe)
    tasks = {task.task_id: task for task in load_tasks(recipe.tasks.path)}
    changed, graded = [], []
    for old in read_trials(folder / "trials.jsonl"):
        if (report := old.report or {}).get("runs"):
            if old.task_id not in tasks:
                text = f"has no task {old.task_id}; restore the tasks"
                raise EvalkitError(f"{recipe.tasks.path}: {text}")
            verdict = judge_logs(tasks[old.task_id], report["runs"], report["dropped"])
            reward = reward_of(verdict.outcome)
            graded.append(
                replace(old, outcome=verdict.outcome, reward=reward, report=verdict.report)
            )
            change = {"before": str(old.outcome), "after": str(verdict.outcome)}
            if old.outcome != verdict.outcome:
                changed.append({"trial_id": old.trial_id, **change})
    (folder / "regraded.jsonl").write_text("".join(map(to_line, graded)), encoding="ascii")
    return changed, len(graded)


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


def _claim(folder: Path, recipe: Recipe) -> None:
    """Write recipe.yaml, or make sure that the folder's own says the same."""
    path, text = folder / "recipe.yaml", dump_recipe(recipe)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        raise EvalkitError(f"{path} is of another recipe; choose another name=, or remove {folder}")


@contextmanager
def _progress(console: Console, label: str, total: int) -> Iterator[Callable[[Trial], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    score, so_far = Counter[str](), TextColumn("{task.fields[score]}")
    with Progress(*columns, TimeElapsedColumn(), so_far, console=console) as bar:
        job = bar.add_task(label, total=total, score="")

        def advance(trial: Trial) -> None:
            score[trial.outcome] += 1
            bar.update(job, advance=1, score=dict(score.most_common(3)))

        yield advance
