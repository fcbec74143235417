"""What the report shows: the files of a run folder in, one JSON-able dict out.

In: trials.jsonl, and where they are there recipe.yaml, metrics.jsonl, trajectories.jsonl and
tokens.json. Out: scores before and after, series, counts per phase, task and bug kind, and the
transcripts of some trials, as many as MAX_TRIALS and MAX_TOKENS allow. A phase is all trials that
one policy ran for one purpose. Refuses (EvalkitError) a folder without trials and unknown schemas.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from nanoswe_evalkit.passk import by_repository, counts_of, paired_difference, pass_estimate
from nanoswe_evalkit.records import read_jsonl
from nanoswe_evalkit.report.transcripts import transcripts
from nanoswe_evalkit.runner import read_trials
from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.nano import BUGS

# Trial ids of a training run: e and g are evaluations (sampled, greedy), s is training itself.
TRAINING_ID = re.compile(r"([egs])(\d{5})\.")
KINDS = {
    bug.kind: re.compile(re.sub(r"\\{[ab]\\}", r"\\w+", re.escape(bug.phrase))) for bug in BUGS
}
Phases = dict[str, list[Trial]]


def gather(folder: Path) -> dict[str, Any]:
    """Everything that the page needs."""
    trials, recipe_path = read_trials(folder / "trials.jsonl"), folder / "recipe.yaml"
    text = recipe_path.read_text(encoding="utf-8") if recipe_path.is_file() else ""
    recipe = yaml.safe_load(text) or {}
    metrics = list(read_jsonl(folder / "metrics.jsonl", "metrics/1", dict))
    phases, labels = _phases(trials, any(m.get("stage") == "sft" for m in metrics))
    shown, vocabulary = transcripts(folder, phases)
    times = [m["time_sec"] for m in metrics if "time_sec" in m]
    return {
        "name": str(recipe.get("name") or folder.resolve().name), "recipe": text,
        "trials": len(trials), "noReward": sum(t.reward is None for t in trials),
        "wallSec": max(times) - min(times) if times else 0,
        "scores": _scores(phases, int(recipe.get("seed") or 0)),
        "series": {stage: _series(metrics, stage) for stage in ("sft", "rl")},
        "evals": [_finite(m) for m in metrics if m.get("stage") == "eval"],
        "phases": [{"id": p, "label": labels[p], **_counts(phases[p])} for p in phases],
        "tasks": _tasks(phases), "shown": shown, "vocabulary": vocabulary,
    }  # fmt: skip


def _phases(trials: Sequence[Trial], sft: bool) -> tuple[Phases, dict[str, str]]:
    """Trials by phase id, and a label for each: evaluations first, in the order of their steps."""
    phases: Phases = {}
    for trial in trials:
        found = TRAINING_ID.match(trial.trial_id)
        name = "eval" if not found else "train" if found[1] == "s" else found[1] + found[2]
        phases.setdefault(name, []).append(trial)
    steps = sorted({name[1:] for name in phases if name not in ("eval", "train")})
    labels = {"eval": "evaluation", "train": "training"}
    for step in steps:
        label = "after RL" if step == steps[-1] else f"step {int(step)}"
        if step == steps[0]:
            label = "after SFT" if sft else "before RL"
        labels |= {f"e{step}": label, f"g{step}": f"{label}, greedy"}
    order = sorted(phases, key=lambda name: (name == "train", name != "eval", name))
    return {name: phases[name] for name in order}, labels


def _scores(phases: Phases, seed: int) -> list[dict[str, Any]]:
    """A card for each of avg@k, pass@k and greedy accuracy: first and last evaluation, and gain.

    Of a single evaluation also avg@k strictly counted, and with the interval of repositories.
    """
    cards = []

    def card(label: str, values: Sequence[Any], gain: Any = None) -> None:
        gains = vars(gain) if gain else None
        cards.append({"label": label, "values": [vars(value) for value in values], "gain": gains})

    for family, words in ((r"eval|e\d+", "avg@{k}"), (r"g\d+", "greedy accuracy")):
        names = [name for name in phases if re.fullmatch(family, name)]
        counts = [counted for name in names if (counted := counts_of(phases[name]))]
        if not counts:
            continue
        ends = [counts[0], counts[-1]][: len(counts)]
        k, label = min(max(n for n, _ in c.values()) for c in ends), words
        paired = len(ends) == 2 and ends[0].keys() & ends[1].keys()
        gain = paired_difference(ends[0], ends[-1], seed) if paired else None
        card(label.format(k=k), [pass_estimate(c, 1) for c in ends], gain)
        if k > 1:
            card(f"pass@{k}", [pass_estimate(c, k) for c in ends])
        if names == ["eval"]:
            strict = counts_of(phases["eval"], strict=True)
            if strict != counts[0]:
                card(f"avg@{k}, no reward as failed", [pass_estimate(strict, 1)])
            if clustered := by_repository(counts[0], seed):
                card(f"avg@{k}, by repository", [clustered])
    return cards


def _series(metrics: Sequence[dict[str, Any]], stage: str) -> dict[str, list[list[float]]]:
    """Metric → [step, value] rows in the order of the steps; a step run twice counts once."""
    rows = {m["step"]: _finite(m) for m in metrics if m.get("stage") == stage}
    series: dict[str, list[list[float]]] = {}
    for step, row in sorted(rows.items()):
        for key, value in row.items():
            if key not in ("step", "time_sec") and isinstance(value, int | float):
                series.setdefault(key, []).append([step, value])
    return series


def _finite(record: dict[str, Any]) -> dict[str, Any]:  # JSON has no NaN, no infinities
    return {k: v for k, v in record.items() if not isinstance(v, float) or math.isfinite(v)}


def _counts(trials: Sequence[Trial]) -> dict[str, Any]:
    """How trials ended, and the mean of each of their clocks."""
    clocks = sorted({name for trial in trials for name in trial.timings})
    return {
        "trials": len(trials), "noReward": sum(t.reward is None for t in trials),
        "outcomes": dict(Counter(str(t.outcome) for t in trials).most_common()),
        "stops": dict(Counter(str(t.stop or "none") for t in trials).most_common()),
        "seconds": {name: fmean(t.timings.get(name, 0) for t in trials) for name in clocks},
    }  # fmt: skip


def _tasks(phases: Phases) -> list[dict[str, Any]]:
    """Per task: its issue, its bug kind where we know it, and [graded, solved] in each phase."""
    tasks: dict[str, dict[str, Any]] = {}
    for phase, trials in phases.items():
        for trial in {trial.task_id: trial for trial in reversed(trials)}.values():
            issue = _issue(trial)
            kind = next((k for k, phrase in KINDS.items() if phrase.search(issue)), "")
            facts = {"id": trial.task_id, "kind": kind, "issue": issue[:400]}
            tasks.setdefault(trial.task_id, {**facts, "counts": {}})
        for task, count in counts_of(trials).items():
            tasks[task]["counts"][phase] = count
    return sorted(tasks.values(), key=lambda task: task["id"])


def _issue(trial: Trial) -> str:
    """The first thing the agent was told, as text."""
    users = (message for message in trial.messages if message.get("role") == "user")
    return str(next(users, {}).get("content") or "").strip()
