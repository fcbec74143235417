"""What the report shows: the files of a run folder in, one JSON-able dict out.

In: trials.jsonl, and where they are there recipe.yaml, metrics.jsonl, trajectories.jsonl,
certificates.jsonl and tokens.json. Out: scores before and after, series, counts per phase, task and
bug kind, certificates, and the transcript of every trial, compressed (of as many as fit into
MAX_BYTES, the phases taking turns): the rows of its trajectory, for the first MAX_ROWS, or else its
messages. A phase is all trials that one policy ran for one purpose. Refuses (EvalkitError) a folder
without trials, unknown schemas, and files that are not what a run writes.
"""

import gzip
import json
import math
import re
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import yaml

from nanoswe_evalkit.grading import log_of
from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.passk import (
    by_repository,
    counts_of,
    no_headline,
    paired_difference,
    pass_estimate,
)
from nanoswe_evalkit.records import read_jsonl
from nanoswe_evalkit.runner import read_trials
from nanoswe_evalkit.sandboxes.base import MIB
from nanoswe_evalkit.trial import Trial
from nanoswe_evalkit.verify import Certificate, read_certificates
from nanoswe_harbor.nano import BUGS

# Trial ids of a training run: e and g are evaluations (sampled, greedy), s is training itself.
TRAINING_ID = re.compile(r"([egs])(\d{5})\.")
KINDS = {
    bug.kind: re.compile(re.sub(r"\\{[ab]\\}", r"\\w+", re.escape(bug.phrase))) for bug in BUGS
}
MAX_ROWS = 200  # trials shown by their tokens
MAX_TOKENS = 400_000  # of all of these
MAX_TEXT = 200_000  # characters of a patch, a message or a log
MAX_BYTES = 96 * MIB  # of all transcripts, as they stand in the page
UNSHOWN = ("schema", "try_", "agent", "report", "messages")
Phases = dict[str, list[Trial]]


def gather(folder: Path) -> dict[str, Any]:
    """Everything that the page needs."""
    trials, recipe_path = read_trials(folder / "trials.jsonl"), folder / "recipe.yaml"
    try:
        text = recipe_path.read_text(encoding="utf-8") if recipe_path.is_file() else ""
        recipe = {"name": "", "seed": 0} | (yaml.safe_load(text) or {})
        seed = int(recipe["seed"])
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise EvalkitError(f"{recipe_path}: not a run's recipe; restore or remove it") from error
    metrics = list(read_jsonl(folder / "metrics.jsonl", "metrics/1", _with("step")))
    phases, held = _phases(trials), {c.task_id: c for c in read_certificates(folder)}
    shown, vocabulary = _transcripts(folder, phases)
    ends = {p: [(t.outcome, t.stop or "none", t.timings) for t in ts] for p, ts in phases.items()}
    times = [m["time_sec"] for m in metrics if "time_sec" in m]
    return {
        "name": str(recipe["name"] or folder.resolve().name), "recipe": text,
        "noHeadline": "" if phases.keys() - {"eval"} else no_headline(trials),
        "trials": len(trials), "noReward": sum(t.reward is None for t in trials),
        "wallSec": max(times) - min(times) if times else 0,
        "scores": _scores(phases, seed, held),
        "series": {stage: _series(metrics, stage) for stage in ("sft", "rl")},
        "evals": [_finite(m) for m in metrics if m.get("stage") == "eval"],
        "phases": [{"id": p, "ends": ends[p]} for p in phases],
        "tasks": _tasks(phases, held), "shown": shown, "vocabulary": vocabulary,
    }  # fmt: skip


def _with(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What lets a record pass that has all these keys."""
    return lambda record: record | {name: record[name] for name in names}


def _phases(trials: Sequence[Trial]) -> Phases:
    """Trials by phase id: evaluations first, in the order of their steps."""
    phases: Phases = {}
    for trial in trials:
        found = TRAINING_ID.match(trial.trial_id)
        name = "eval" if not found else "train" if found[1] == "s" else found[1] + found[2]
        phases.setdefault(name, []).append(trial)
    order = sorted(phases, key=lambda name: (name == "train", name != "eval", name))
    return {name: phases[name] for name in order}


def _scores(phases: Phases, seed: int, held: Mapping[str, Certificate]) -> list[dict[str, Any]]:
    """A card for each of avg@k, pass@k and greedy accuracy: first and last evaluation, and gain.

    Of a single evaluation also avg@k strictly counted, over certified tasks, and with the interval
    of repositories.
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
            certified = {name for name, c in held.items() if c.verdict == "certified"}
            if sound := {t: n for t, n in counts[0].items() if t in certified}:
                card(f"avg@{k}, certified", [pass_estimate(sound, 1)])
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


def _tasks(phases: Phases, held: Mapping[str, Certificate]) -> list[dict[str, Any]]:
    """Per task: its issue, its bug kind where we know it, and [graded, solved] in each phase."""
    tasks: dict[str, dict[str, Any]] = {}
    for phase, trials in phases.items():
        for trial in {trial.task_id: trial for trial in reversed(trials)}.values():
            told = (m.get("content") or "" for m in trial.messages if m.get("role") == "user")
            issue = str(next(told, "")).strip()
            kind = next((k for k, phrase in KINDS.items() if phrase.search(issue)), "")
            facts = {"id": trial.task_id, "kind": kind, "issue": issue[:400]}
            if certificate := held.get(trial.task_id):
                facts["certificate"] = certificate.verdict
                facts["doubts"] = [*certificate.wrong_labels, *certificate.flaky_tests][:20]
            tasks.setdefault(trial.task_id, {**facts, "counts": {}})
        for task, count in counts_of(trials).items():
            tasks[task]["counts"][phase] = count
    return sorted(tasks.values(), key=lambda task: task["id"])


def _transcripts(folder: Path, phases: Phases) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """(the chosen trials, token id → text)"""
    chosen = _choose(phases)
    names, rows = {trial.trial_id for _, trial in chosen[:MAX_ROWS]}, dict[str, Any]()
    path = folder / "tokens.json"
    try:  # a model may have, and sample, ids without a text
        texts = dict(enumerate(json.loads(path.read_bytes()) if path.is_file() else ()))
    except (ValueError, TypeError) as error:
        raise EvalkitError(f"{path}: not a list of texts; remove it to see messages") from error
    of_trial = _with("trial_id", "samples")
    for record in read_jsonl(folder / "trajectories.jsonl", "trajectory/1", of_trial):
        if record["trial_id"] in names:
            rows[record["trial_id"]] = record["samples"] if texts else []
    vocabulary: dict[int, str] = {}
    shown: list[dict[str, Any]] = []
    left, room = MAX_TOKENS, MAX_BYTES
    for phase, trial in chosen:
        samples = rows.pop(trial.trial_id, [])
        left -= sum(len(sample["tokens"]) for sample in samples)
        samples = samples if left > 0 else []
        vocabulary |= {i: texts.get(i, f"⟨{i}⟩") for sample in samples for i in sample["tokens"]}
        messages = [] if samples else [_message(m) for m in trial.messages]
        told = _trial(trial) | {"rows": [_row(s) for s in samples], "messages": messages}
        packed = b64encode(gzip.compress(json.dumps(told).encode(), 6, mtime=0)).decode()
        if (room := room - len(packed)) < 0:
            break
        listed = {name: told[name] for name in ("trial_id", "task_id", "attempt", "outcome")}
        shown.append({**listed, "phase": phase, "packed": packed})
    return shown, vocabulary


def _choose(phases: Mapping[str, Sequence[Trial]]) -> list[tuple[str, Trial]]:
    """(phase, trial), the phases taking turns; first of training are trials of all its steps."""
    queues = []
    for phase, trials in phases.items():
        rows = sorted(trials, key=lambda t: (t.attempt, t.task_id))
        if phase == "train":
            rows = sorted(trials, key=lambda t: zlib.crc32(t.trial_id.encode()))
        queues.append([(phase, trial) for trial in rows])
    return list(filter(None, chain.from_iterable(zip_longest(*queues))))


def _trial(trial: Trial) -> dict[str, Any]:
    report, record = trial.report or {}, asdict(trial)
    kinds = [kind for kind in ("fail_to_pass", "pass_to_pass") if kind in report]
    tests = {kind: {word: len(ids) for word, ids in report[kind].items()} for kind in kinds}
    why = trial.error or str(report.get("reason") or "")
    shown = {key: value for key, value in record.items() if key not in UNSHOWN}
    try:
        log = log_of(report["runs"][0])[-MAX_TEXT:] if report.get("runs") else report.get("log", "")
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        raise EvalkitError(f"{trial.trial_id}: the stored log is damaged ({error!r})") from error
    return {**shown, "patch": trial.patch[:MAX_TEXT], "error": why, "tests": tests, "log": log}


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    """`ends` has, per turn of this row, the index after its last sampled token."""
    ends = {turn: index for index, turn in enumerate(sample["turns"], 1) if turn >= 0}
    versions = [version for version in sample["versions"] if version >= 0]
    logprobs = [None if x is None else round(x, 3) for x in sample["logprobs"]]
    span = [min(versions), max(versions)] if versions else []
    kept = {"tokens": sample["tokens"], "provenance": sample["provenance"]}
    return {**kept, "logprobs": logprobs, "ends": sorted(ends.values()), "versions": span}


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    lines = [text, *(f"{f['name']} {f['arguments']}" for f in functions)]
    return {"role": str(message.get("role")), "text": "\n".join(lines).strip()[:MAX_TEXT]}
