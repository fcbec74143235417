"""The trials that one can page through: which ones, and their tokens in a compact form.

In: a run folder and its trials by phase. Out: up to MAX_TRIALS trials, the phases taking turns,
with the rows of their trajectories, or with their messages where there is no trajectory; and the
texts of the tokens in use. An evaluation gives the same (task, attempt) pairs before and after;
training gives trials spread over its steps.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nanoswe_evalkit.report.records import read_jsonl
from nanoswe_evalkit.trial import Trial

MAX_TRIALS = 200
MAX_TOKENS = 400_000
MAX_TEXT = 20_000  # characters of a patch or a message


def transcripts(
    folder: Path, phases: Mapping[str, Sequence[Trial]]
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """(the chosen trials, token id → text)"""
    chosen = dict(_choose(phases))
    rows = {}
    for record in read_jsonl(folder / "trajectories.jsonl", "trajectory/1"):
        if record["trial_id"] in chosen:
            rows[record["trial_id"]] = record["samples"]
    texts = _texts(folder / "tokens.json")
    vocabulary: dict[int, str] = {}
    shown: list[dict[str, Any]] = []
    left = MAX_TOKENS
    for name, (phase, trial) in chosen.items():
        samples = rows.get(name, [])
        messages = [] if samples else [_message(m) for m in trial.messages]
        left -= sum(len(s["tokens"]) for s in samples) + len(json.dumps(messages)) // 4
        if left < 0:
            break
        for sample in samples:
            own = sample.get("text") or [texts.get(i, f"⟨{i}⟩") for i in sample["tokens"]]
            vocabulary.update(zip(sample["tokens"], own, strict=True))
        shown.append(_trial(trial, phase, [_row(s) for s in samples], messages))
    return shown, vocabulary


def _choose(phases: Mapping[str, Sequence[Trial]]) -> Iterator[tuple[str, tuple[str, Trial]]]:
    """(trial id, (phase, trial)), the phases taking turns until there are enough."""
    queues = []
    for phase, trials in phases.items():
        rows = sorted(trials, key=lambda t: (t.attempt, t.task_id))
        if phase == "train":
            rows = sorted(trials, key=lambda t: t.trial_id)
            rows = rows[:: max(1, len(rows) * len(phases) // MAX_TRIALS)]
        queues.append([(trial.trial_id, (phase, trial)) for trial in rows])
    turns = (item for turn in zip_longest(*queues) for item in turn if item is not None)
    yield from (item for _, item in zip(range(MAX_TRIALS), turns, strict=False))


def _trial(
    trial: Trial, phase: str, rows: list[dict[str, Any]], messages: list[dict[str, str]]
) -> dict[str, Any]:
    report = trial.report or {}
    tests = {
        kind: {verdict: len(ids) for verdict, ids in report[kind].items()}
        for kind in ("fail_to_pass", "pass_to_pass")
        if kind in report
    }
    return {
        "id": trial.trial_id, "task": trial.task_id, "phase": phase, "attempt": trial.attempt,
        "outcome": str(trial.outcome), "stop": str(trial.stop or ""), "reward": trial.reward,
        "turns": trial.turns, "patch": trial.patch[:MAX_TEXT],
        "error": trial.error or str(report.get("reason") or ""), "tests": tests,
        "timings": trial.timings, "rows": rows, "messages": messages
    }  # fmt: skip


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    """`ends` has, per turn of this row, the index after its last sampled token."""
    ends: dict[int, int] = {}
    for index, turn in enumerate(sample["turns"]):
        if turn >= 0:
            ends[turn] = index + 1
    versions = sorted({version for version in sample["versions"] if version >= 0})
    return {
        "tokens": sample["tokens"], "provenance": sample["provenance"],
        "logprobs": [None if x is None else round(x, 3) for x in sample["logprobs"]],
        "ends": sorted(ends.values()), "versions": [versions[0], versions[-1]] if versions else []
    }  # fmt: skip


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    calls = [
        f"{call['function']['name']} {call['function']['arguments']}"
        for call in message.get("tool_calls") or []
    ]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    return {"role": str(message.get("role")), "text": "\n".join([text, *calls]).strip()[:MAX_TEXT]}


def _texts(path: Path) -> dict[int, str]:
    """Token id → text, from a list or a mapping; empty when the run has no such file."""
    if not path.is_file():
        return {}
    texts = json.loads(path.read_text(encoding="utf-8"))
    items = texts.items() if isinstance(texts, dict) else enumerate(texts)
    return {int(i): str(text) for i, text in items}
