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
from typing import Any

import yaml

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.passk import counts_of, paired_difference, pass_estimate
from nanoswe_evalkit.report.records import read_jsonl
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
    path = folder / "trials.jsonl"
    if not path.is_file():
        raise EvalkitError(f"{folder}: holds no trials.jsonl; name the folder of a run")
    recipe_path = folder / "recipe.yaml"
    text = recipe_path.read_text(encoding="utf-8") if recipe_path.is_file() else ""
    recipe = yaml.safe_load(text) or {}
    trials = read_trials(path)
    metrics = list(read_jsonl(folder / "metrics.jsonl", "metrics/1"))
    phases, labels = _phases(trials, any(m.get("stage") == "sft" for m in metrics))
    shown, vocabulary = transcripts(folder, phases)
    times = [m["time_sec"] for m in metrics if "time_sec" in m]
    return {
        "name": str(recipe.get("name") or folder.resolve().name),
        "recipe": text,
        "trials": len(trials),
        "noReward": sum(t.reward is None for t in trials),
        "wallSec": max(times) - min(times) if times else 0,
        "scores": _scores(phases, int(recipe.get("seed") or 0)),
        "series": {stage: _series(metrics, stage) for stage in ("sft", "rl")},
        "evals": [_finite(m) for m in metrics if m.get("stage") == "eval"],
        "phases": [
            {"id": p, "label": labels[p], "trials": len(rows), **_counts(rows)}
            for p, rows in phases.items()
        ],
        "tasks": _tasks(phases),
        "shown": shown,
        "vocabulary": vocabulary,
    }


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
        label = f"step {int(step)}"
        if step == steps[0]:
            label = "after SFT" if sft else "before RL"
        elif step == steps[-1]:
            label = "after RL"
        labels |= {f"e{step}": label, f"g{step}": f"{label}, greedy"}
    order = [name for name in ("eval", *sorted(phases.keys() - {"eval", "train"}), "train")]
    return {name: phases[name] for name in order if name in phases}, labels


def _scores(phases: Phases, seed: int) -> list[dict[str, Any]]:
    """One card each: avg@k, pass@k and greedy accuracy, first and last evaluation, and the gain."""
    cards = []
    families = ((r"eval|e\d+", "avg@{k}"), (r"g\d+", "greedy accuracy"))
    for family, words in families:
        names = sorted(p for p in phases if re.fullmatch(family, p))
        counts = [counts_of(phases[p]) for p in names]
        counts = [c for c in counts if c]
        if not counts:
            continue
        first, last = counts[0], counts[-1]
        k = min(max(n for n, _ in c.values()) for c in (first, last))
        gain = None
        if len(counts) > 1 and first.keys() & last.keys():
            gain = vars(paired_difference(first, last, seed))
        both = [first, last] if len(counts) > 1 else [first]
        estimates = [vars(pass_estimate(c, 1, seed)) for c in both]
        cards.append({"label": words.format(k=k), "values": estimates, "gain": gain})
        if k > 1:
            tops = [vars(pass_estimate(c, k, seed)) for c in both]
            cards.append({"label": f"pass@{k}", "values": tops, "gain": None})
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
    return {
        "noReward": sum(t.reward is None for t in trials),
        "outcomes": dict(Counter(str(t.outcome) for t in trials).most_common()),
        "stops": dict(Counter(str(t.stop or "none") for t in trials).most_common()),
    }


def _tasks(phases: Phases) -> list[dict[str, Any]]:
    """Per task: its issue, its bug kind where we know it, and [graded, solved] in each phase."""
    tasks: dict[str, dict[str, Any]] = {}
    for phase, trials in phases.items():
        for trial in trials:
            if trial.task_id not in tasks:
                issue = _issue(trial)
                kind = next((k for k, phrase in KINDS.items() if phrase.search(issue)), "")
                tasks[trial.task_id] = {
                    "id": trial.task_id, "kind": kind, "issue": issue[:400], "counts": {},
                }  # fmt: skip
        for task, (graded, solved) in counts_of(trials).items():
            tasks[task]["counts"][phase] = [graded, solved]
    return sorted(tasks.values(), key=lambda task: task["id"])


def _issue(trial: Trial) -> str:
    """The first thing the agent was told, as text."""
    users = (message for message in trial.messages if message.get("role") == "user")
    return str(next(users, {}).get("content") or "").strip()
