"""The real OpenHands SDK, in its own Python, against a scripted chat service, in bwrap.

What is sent is asserted on the wire. It needs `tools/setup openhands`, so all of it is interop, by
`nox --session agents`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, Reply, fake_model
from test_trial import _fix

from nanoswe_evalkit.agents.base import ModelConfig
from nanoswe_evalkit.agents.runner import RunnerAgent
from nanoswe_evalkit.outcome import EvalkitError, Outcome, Stop
from nanoswe_evalkit.recipe import AgentSection
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import Task

TOO_LONG = (
    '{"error": {"message": "maximum context length is 9", "code": "context_length_exceeded"}}'
)
pytestmark = pytest.mark.interop
ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".openhands/bin/python"
MODEL = ModelConfig(
    "tiny",
    temperature=0.25,
    max_tokens=77,
    seed=3,
    timeout_sec=5,
    sampling={"top_p": 0.9, "top_k": 20},
)
ids = count()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"c{next(ids)}", "type": "function", "function": function}]}


def edit(command: str, path: str = "/testbed/new.txt", **more: str) -> dict[str, Any]:
    return call("file_editor", command=command, path=path, **more)


def terminal(command: str, **more: Any) -> dict[str, Any]:
    return call("terminal", command=command, **more)


DONE = call("finish", message="done")


@asynccontextmanager
async def agent(**settings: Any) -> AsyncIterator[RunnerAgent]:
    section = AgentSection(kind="openhands", **{"max_turns": 12, **settings})
    made = RunnerAgent("openhands", PYTHON, section.model_dump(exclude={"python"}))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def _run(
    sandboxes: SandboxFactory, task: Task, replies: Sequence[Reply], **settings: Any
) -> tuple[Trial, FakeModel]:
    async def main() -> tuple[Trial, FakeModel]:
        # The agent goes first: the service waits for its connections.
        async with fake_model(replies) as model, agent(**settings) as made:
            trial = await run_trial(
                task,
                0,
                trial_id="x.0",
                agent=made,
                sandboxes=sandboxes,
                base_url=model.base_url,
                model=MODEL,
            )
        return trial, model

    return asyncio.run(main())


def _factory(kind: str, nano: Path, work: Path) -> SandboxFactory:
    limits = Limits(timeout_sec=20, memory_mb=512, processes=48, file_mb=16)
    return SandboxFactory(kind, work, nano / "mirror", limits)


def test_it_fixes_a_bug(nano: Path, task: Task, tmp_path: Path) -> None:
    replies = [
        terminal("cd tests && export Q=7 && pwd"),
        terminal("echo $Q; exit"),
        terminal("pwd"),
        call("file_editor", command="create", path="/testbed/new.txt", file_text="a\nb\n"),
        call(
            "file_editor", command="str_replace", path="/testbed/new.txt", old_str="b", new_str="c"
        ),
        call("file_editor", command="view", path="/testbed"),
        call("file_editor", command="view", path="/etc/nothing"),
        terminal(f"cat new.txt; {_fix(task)}"),
        "I am done.",
        call("finish", message="done"),
    ]

    trial, model = _run(_factory("bwrap", nano, tmp_path), task, replies, nudges=1)
    assert (trial.stop, trial.outcome) == (Stop.FINISHED, Outcome.RESOLVED), trial.error
    assert trial.turns == trial.agent["model_calls"] == len(model.requests) == len(replies)
    assert (trial.agent["nudges"], trial.agent["condensations"]) == (1, 0)
    told = [str(m["content"]) for m in trial.messages if m["role"] == "tool"]
    assert "/testbed/tests" in told[0] and told[1].startswith("7\n") and "/testbed\n" in told[2]
    assert "File created" in told[3] and "has been edited" in told[4]
    assert (
        "/testbed/new.txt" in told[5] and "does not exist" in told[6] and told[7].startswith("a\nc")
    )
    first = model.requests[0]
    sent = {"model": "tiny", "temperature": 0.25, "max_completion_tokens": 77}
    sent |= {"top_p": 0.9, "top_k": 20}
    assert {key: first[key] for key in sent} == sent
    assert "reasoning_effort" not in first and isinstance(first["seed"], int)
    names = [tool["function"]["name"] for tool in first["tools"]]
    assert names == ["terminal", "file_editor", "task_tracker", "finish", "think"]
    text = json.dumps(first)
    assert "/testbed" in text and str(tmp_path) not in text and "nanoswe-" not in text
    assert all(isinstance(m.get("content", ""), str) for m in model.requests[-1]["messages"])
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]


@pytest.mark.parametrize(
    ("replies", "settings", "stop", "outcome"),
    [
        (["no"], {}, Stop.PLAIN_TEXT, Outcome.NO_PATCH),
        (["no"], {"nudges": 2}, Stop.PLAIN_TEXT, Outcome.NO_PATCH),
        ([terminal("true")], {}, Stop.STUCK, Outcome.NO_PATCH),
        ([terminal("true")], {"stuck_detector": False}, Stop.MAX_TURNS, Outcome.NO_PATCH),
        (
            [terminal("echo x > new"), DONE],
            {},
            Stop.FINISHED,
            Outcome.UNRESOLVED,
        ),
        (
            [terminal("rm -rf .git"), DONE],
            {},
            Stop.FINISHED,
            Outcome.NO_PATCH,
        ),
        ([(401, "{}")], {}, None, Outcome.INFRA_ERROR),
        (
            [(400, TOO_LONG)],
            {},
            Stop.CONTEXT,
            Outcome.NO_PATCH,
        ),
        ([terminal("sleep 99", timeout=90)], {}, Stop.TIMEOUT, Outcome.NO_PATCH),
        ([terminal("kill -9 -1"), DONE], {}, Stop.FINISHED, Outcome.NO_PATCH),
    ],
    ids=["text", "nudged", "stuck", "turns", "wrong", "no-git", "key", "context", "slow", "killed"],
)
def test_how_it_ends(
    nano: Path,
    task: Task,
    tmp_path: Path,
    replies: list[Reply],
    settings: dict[str, Any],
    stop: Stop | None,
    outcome: Outcome,
) -> None:
    hurried = replace(task, agent_timeout_sec=6.0) if stop is Stop.TIMEOUT else task
    trial, _ = _run(_factory("bwrap", nano, tmp_path), hurried, replies, **settings)
    assert (trial.stop, trial.outcome) == (stop, outcome), (trial.error, trial.agent)


def test_no_python_is_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        await RunnerAgent("openhands", tmp_path / "python", {}).start()

    with pytest.raises(EvalkitError, match="just setup openhands"):
        asyncio.run(main())
