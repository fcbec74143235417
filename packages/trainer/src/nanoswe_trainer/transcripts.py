"""Found records of agents at work: files in; for each record its rendered parts, or why it is
refused, out.

Read: chat messages with tools (OpenHands, SWE-Gym), ShareGPT, SWE-smith (its calls stay text, as
the model wrote them), mini-swe-agent's .traj.json, SWE-agent's .traj, Harbor's ATIF, and our own
sealed trajectories, whose tokens are taken as they are. Refused: a record that does not hold what
the model read and wrote. What follows the last reply is left out: nothing is trained there.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoswe_evalkit.runner import read_trials
from nanoswe_proxy import wire
from nanoswe_proxy.errors import ProxyError
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.render.types import Encoded
from nanoswe_proxy.trajectory import Trajectory, from_json

SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system"}
ELSEWHERE = "what the model read is not in the record"


class TranscriptError(ValueError):
    """A file that is no record of an agent, or a record that cannot be learned from."""


@dataclass(frozen=True)
class Example:
    """`parts` as a renderer gives them; empty where the record is `refused`, with the reason."""

    name: str
    parts: tuple[Encoded, ...] = ()
    reward: float | None = None  # None: the file does not say
    refused: str = ""


def examples(path: Path, renderer: Renderer) -> Iterator[Example]:
    """The records of a file, in order: a line each in .jsonl, otherwise the file is one."""
    beside = path.with_name("trials.jsonl")  # of a run of ours: what its trajectories were worth
    rewards: dict[str, float | None] = {}
    for name, text in _texts(path):
        try:
            record = json.loads(text)
            if isinstance(record, dict) and record.get("schema") == Trajectory.schema:
                if not rewards and beside.exists():
                    rewards = {trial.trial_id: trial.reward for trial in read_trials(beside)}
                yield from _sealed(name, text, rewards, renderer)
                continue
            messages, tools = conversation(record)
            parts = tuple(renderer.render_messages(messages, tools))
            told = record.get("reward", record.get("resolved"))
            yield Example(name, parts, float(told) if isinstance(told, int | float) else None)
        except (ProxyError, TypeError, AttributeError, LookupError, ValueError) as error:
            yield Example(name, refused=" ".join(str(error).split()) or type(error).__name__)


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix != ".jsonl":
                yield path.name, file.read()
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path.name}:{number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise TranscriptError(f"{path}: cannot be read ({error}); see sft.data") from error


def _sealed(
    name: str, text: str, rewards: dict[str, float | None], renderer: Renderer
) -> Iterator[Example]:
    trajectory = from_json(text)
    reward = trajectory.notes.get("reward", rewards.get(trajectory.trial_id))
    for sample in trajectory.samples:
        if max(sample.tokens) >= renderer.codec.full.get_vocab_size():
            raise TranscriptError("its tokens are of another tokenizer")
        yield Example(name, (Encoded(sample.tokens, sample.provenance),), reward)


def conversation(record: Any) -> tuple[list[dict], list[dict] | None]:
    """Wire-normal messages up to the last reply, and the tools that the record lists."""
    tools = None
    match record:
        case {"schema_version": str(), "steps": list(steps), "agent": dict(agent)}:
            messages, tools = _atif(steps), agent.get("tool_definitions")
        case {"conversations": list(said)}:
            system = [{"from": "system", "value": record["system"]}] if "system" in record else []
            messages = [
                {"role": SHAREGPT.get(m["from"], m["from"]), "content": m["value"]}
                for m in system + said
            ]
        case {"history": list(said), "trajectory": list()}:
            messages = [m | {"tool_call_id": (m.get("tool_call_ids") or [""])[0]} for m in said]
        case {"messages": list(messages)}:
            tools = record.get("tools")
        case {"responses_create_params": {"input": []}}:
            raise TranscriptError(f"Responses API items after an empty input: {ELSEWHERE}")
        case list():
            raise TranscriptError(f"a list of an agent's own events, not of messages: {ELSEWHERE}")
        case _:
            raise TranscriptError("none of the formats that are read: no messages, no steps in it")
    replies = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    if not replies:
        raise TranscriptError("no assistant message in it: nothing to learn")
    return wire.normalise(messages[: replies[-1] + 1]), wire.check_tools(tools)


def _atif(steps: list[dict]) -> list[dict]:
    """System steps after the first message are notes of the harness: no model reads them."""
    messages: list[dict] = []
    for step in steps:
        where, source = f"step {step.get('step_id')}", step.get("source")
        results = (step.get("observation") or {}).get("results") or []
        if any("subagent_trajectory_ref" in result for result in results):
            raise TranscriptError(f"{where}: a summary replaced the history: {ELSEWHERE}")
        if source != "agent":
            if source == "user" or not any(m["role"] == "user" for m in messages):
                messages.append({"role": source, "content": step.get("message")})
            continue
        calls = [
            {"id": c["tool_call_id"],
             "function": {"name": c["function_name"], "arguments": c.get("arguments")}}
            for c in step.get("tool_calls") or []
        ]  # fmt: skip
        messages.append({"role": "assistant", "content": step.get("message"), "tool_calls": calls,
                         "reasoning_content": step.get("reasoning_content")})  # fmt: skip
        for result in results:
            call = result.get("source_call_id")
            if calls and not call:
                how = "its calls were read out of text that is not in the record"
                raise TranscriptError(f"{where}: an observation that answers no call: {how}")
            role = {"role": "tool", "tool_call_id": call} if call else {"role": "user"}
            messages.append(role | {"content": result.get("content")})
    return messages
