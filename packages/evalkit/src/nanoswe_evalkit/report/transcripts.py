"""The trials that one can page through: which ones, and their tokens in a compact form.

In: a run folder and its trials by phase. Out: up to MAX_TRIALS trials, the phases taking turns,
with the rows of their trajectories, or with their messages where there is no trajectory; and the
texts of the tokens in use. An evaluation gives the same (task, attempt) pairs before and after;
training gives trials spread over its steps.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from nanoswe_evalkit.grading import log_of
from nanoswe_evalkit.records import read_jsonl
from nanoswe_evalkit.trial import Trial

MAX_TRIALS = 200
MAX_TOKENS = 400_000
MAX_TEXT = 20_000  # characters of a patch or a message
UNSHOWN = ("schema", "try_", "agent", "report", "messages")


def transcripts(
    folder: Path, phases: Mapping[str, Sequence[Trial]]
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """(the chosen trials, token id → text)"""
    chosen = _choose(phases)
    names, rows = {trial.trial_id for _, trial in chosen}, {}
    for record in read_jsonl(folder / "trajectories.jsonl", "trajectory/1", dict):
        if record["trial_id"] in names:
            rows[record["trial_id"]] = record["samples"]
    texts = _texts(folder / "tokens.json")
    vocabulary: dict[int, str] = {}
    shown: list[dict[str, Any]] = []
    left = MAX_TOKENS
    for phase, trial in chosen:
        samples = rows.get(trial.trial_id, [])
        messages = [] if samples else [_message(m) for m in trial.messages]
        left -= sum(len(s["tokens"]) for s in samples) + len(json.dumps(messages)) // 4
        if left < 0:
            break
        for sample in samples:
            own = sample.get("text") or [texts.get(i, f"⟨{i}⟩") for i in sample["tokens"]]
            vocabulary.update(zip(sample["tokens"], own, strict=True))
        tokens = [_row(sample) for sample in samples]
        shown.append({**_trial(trial), "phase": phase, "rows": tokens, "messages": messages})
    return shown, vocabulary


def _choose(phases: Mapping[str, Sequence[Trial]]) -> list[tuple[str, Trial]]:
    """(phase, trial), the phases taking turns until there are enough."""
    queues = []
    for phase, trials in phases.items():
        rows = sorted(trials, key=lambda t: (t.attempt, t.task_id))
        if phase == "train":
            stride = max(1, len(trials) * len(phases) // MAX_TRIALS)
            rows = sorted(trials, key=lambda t: t.trial_id)[::stride]
        queues.append([(phase, trial) for trial in rows])
    turns = chain.from_iterable(zip_longest(*queues))
    return list(islice(filter(None, turns), MAX_TRIALS))


def _trial(trial: Trial) -> dict[str, Any]:
    report, record = trial.report or {}, asdict(trial)
    kinds = [kind for kind in ("fail_to_pass", "pass_to_pass") if kind in report]
    tests = {kind: {word: len(ids) for word, ids in report[kind].items()} for kind in kinds}
    why = trial.error or str(report.get("reason") or "")
    shown = {key: value for key, value in record.items() if key not in UNSHOWN}
    log = log_of(report["runs"][0])[-MAX_TEXT:] if report.get("runs") else report.get("log", "")
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


def _texts(path: Path) -> dict[int, str]:
    """Token id → text, from a list or a mapping; empty when the run has no such file."""
    if not path.is_file():
        return {}
    texts = json.loads(path.read_text(encoding="utf-8"))
    items = texts.items() if isinstance(texts, dict) else enumerate(texts)
    return {int(i): str(text) for i, text in items}
