"""Every agent end to end: its own loop → the real proxy with a scripted engine → a sandbox → grade.

`openhands` and `mini` need the Pythons of tools/setup, so all of it is interop, by
`nox --session agents`. No model, no download; what the agent counts, the proxy has on record.
"""

import asyncio
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from live_proxy import LiveProxy, live_proxy, use
from test_trial import _fix

from nanoswe_evalkit.agents.base import ModelConfig
from nanoswe_evalkit.agents.runner import RunnerAgent
from nanoswe_evalkit.outcome import Outcome, Stop
from nanoswe_evalkit.place import make_agent
from nanoswe_evalkit.recipe import AgentSection
from nanoswe_evalkit.runner import Gate, run_trials
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import Task
from nanoswe_proxy.engine.scripted import Script

pytestmark = pytest.mark.interop
ROOT = Path(__file__).parents[3]
MORE = {"top_p": 0.9}
MODEL = ModelConfig("policy", 0.5, 900, seed=3, timeout_sec=20, sampling=MORE)
# A program that would be Claude Code or Codex: urllib and a shell are all it takes.
PROGRAM = r"""python3 - <<'END'
import json, os, subprocess, sys, urllib.error, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
print("begun in", os.getcwd(), flush=True)
while True:
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": [tool]})
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    try:
        message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit(f"the service says {error.code}")
    messages.append(message)
    if not message.get("tool_calls"):
        sys.exit(0)
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], stdout=-1, stderr=-2)
        text = done.stdout.decode(errors="replace")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
END"""
# Each agent's way to run a command, and to say that it is done.
RUN = {
    "openhands": lambda command: use("terminal", command=command),
    "mini": lambda command: use("bash", command=command),
    "nano": lambda command: use("bash", command=command),
    "command": lambda command: use("bash", command=command),
}
DONE = {
    "openhands": use("finish", message="done"),
    "mini": use("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "nano": use("bash", command="submit"),
    "command": "I am done.",
}


def _run(
    kind: str, sandbox: str, nano: Path, tasks: Sequence[Task], scripts: Sequence[Script | str],
    work: Path, *, max_context: int = 200_000, agent_sec: float = 600, **settings: Any
) -> tuple[list[Trial], LiveProxy]:  # fmt: skip
    options: dict[str, Any] = {"kind": kind, "max_turns": 8, **settings}
    if kind == "command":
        options.setdefault("command", PROGRAM)
    if kind in ("openhands", "mini"):
        options["python"] = ROOT / f".{kind}/bin/python"
    limits = Limits(timeout_sec=60, memory_mb=1024, processes=64, file_mb=16)
    sandboxes = SandboxFactory(sandbox, work / "work", nano / "mirror", limits)
    hurried = [replace(task, agent_timeout_sec=agent_sec) for task in tasks]

    async def main() -> tuple[list[Trial], LiveProxy]:
        agent = make_agent(AgentSection(**options))
        async with live_proxy(work / "model", scripts, max_context) as proxy:
            try:
                if isinstance(agent, RunnerAgent):
                    await agent.start()  # its imports are not on the first trial's clock
                run = partial(run_trial, agent=agent, sandboxes=sandboxes, model=MODEL)
                trials = await run_trials(
                    hurried, 1, run=run, gate=Gate(2), open_session=proxy.open,
                    close_session=proxy.close,
                )  # fmt: skip
            finally:
                await agent.close()
        return trials, proxy

    return asyncio.run(main())


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with git and the Python that the tasks' tests want."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "Dockerfile").write_text(
        "FROM debian:bookworm-slim\nRUN command -v git && command -v python3 || (apt-get update && "
        "apt-get install -y --no-install-recommends git python3)\n"
    )
    command = ["docker", "build", "-q", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _fixed(kind: str, sandbox: str, nano: Path, tasks: Sequence[Task], work: Path) -> None:
    """The same bug for all, so one script mends each."""
    scripts = [RUN[kind]("cat README.md; ls"), RUN[kind](_fix(tasks[0])), DONE[kind]]
    trials, proxy = _run(kind, sandbox, nano, tasks, scripts, work)
    for trial in trials:
        told = (trial.error, trial.report, trial.messages)
        assert (trial.stop, trial.outcome) == (Stop.FINISHED, Outcome.RESOLVED), told
        turns = proxy.sealed[trial.trial_id].turns
        assert len(turns) == 3 and trial.turns == 3
        assert trial.agent.get("model_calls", 3) == 3
        assert all(turn.requested["top_p"] == 0.9 for turn in turns), turns[0].requested
        assert 0 < trial.timings["model_sec"] < trial.timings["agent_sec"]


@pytest.mark.parametrize("kind", list(RUN))
def test_it_solves_in_bwrap(kind: str, nano: Path, task: Task, tmp_path: Path) -> None:
    _fixed(kind, "bwrap", nano, [task], tmp_path)


@pytest.mark.parametrize("kind", ["openhands", "mini", "command"])
def test_it_solves_in_docker(kind: str, nano: Path, task: Task, tmp_path: Path, image: str) -> None:
    _fixed(kind, "docker", nano, [replace(task, docker_image=image)], tmp_path)


def test_no_file_name_of_the_sandbox_leads_out_of_it(
    nano: Path, task: Task, tmp_path: Path, image: str
) -> None:
    """The editor shows a folder by a copy of its names, which the sandbox's own find says."""
    outside = tmp_path / "planted"
    up = "../" * 12 + str(outside)[1:]
    names = [f"{outside}", up, f"{outside}-folder/", "seen", "y/z"]
    find = f"#!/bin/sh\nprintf '%s\\0' {' '.join(names)}\n"
    plant = f"cat > /usr/bin/find <<'END'\n{find}END\nchmod +x /usr/bin/find"
    views = [use("file_editor", command="view", path=p) for p in ("/testbed", up, "a\0b")]
    replies = [RUN["openhands"](plant), *views, DONE["openhands"]]
    (trial,), _ = _run(
        "openhands", "docker", nano, [replace(task, docker_image=image)], replies, tmp_path
    )
    assert (trial.stop, trial.outcome) == (Stop.FINISHED, Outcome.NO_PATCH), trial.error
    assert not list(tmp_path.glob("planted*"))


FLOOD = "head -c 3000000 /dev/zero | tr '\\0' x"
ENDINGS: dict[str, tuple[list[Any], dict[str, Any], Stop | None, Outcome]] = {
    "wrong-fix": (["RUN echo x > new", "DONE"], {}, Stop.FINISHED, Outcome.UNRESOLVED),
    "nothing": (["DONE"], {}, Stop.FINISHED, Outcome.NO_PATCH),
    "no-git": (["RUN rm -rf .git", "DONE"], {}, Stop.FINISHED, Outcome.NO_PATCH),
    "tamper": (["TAMPER", "DONE"], {}, Stop.FINISHED, Outcome.TAMPER),
    "too-many-turns": (["RUN true"] * 9, {"max_turns": 3}, Stop.MAX_TURNS, Outcome.NO_PATCH),
    "slow-command": (["RUN sleep 99"], {"agent_sec": 12}, Stop.TIMEOUT, Outcome.NO_PATCH),
    # No answer in more than half of the agent's time: the engine hangs, which scored 0.
    "hung-model": ([Script("x", delay_sec=60)] * 3, {"agent_sec": 8}, None, Outcome.INFRA_ERROR),
    "context": (["DONE"], {"max_context": 300}, Stop.CONTEXT, Outcome.NO_PATCH),
    "engine-fails": ([Script("x", fail_after=0)] * 30, {}, None, Outcome.INFRA_ERROR),
    "killed": (["RUN kill -9 -1", "DONE"], {}, Stop.FINISHED, Outcome.NO_PATCH),
    "flood": ([f"RUN {FLOOD}", "FIX", "DONE"], {}, Stop.FINISHED, Outcome.RESOLVED),
    "bad-arguments": (["BAD", "FIX", "DONE"], {}, Stop.FINISHED, Outcome.RESOLVED),
    "late-timeout": (["FIX", "RUN sleep 99"], {"agent_sec": 20}, Stop.TIMEOUT, Outcome.RESOLVED),
}


@pytest.mark.parametrize("kind", ["openhands", "mini"])
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_how_it_ends(kind: str, ending: str, nano: Path, task: Task, tmp_path: Path) -> None:
    replies, settings, stop, outcome = ENDINGS[ending]
    blind = "import unittest; unittest.TestCase.assertEqual = lambda *a: None"
    named = {"DONE": DONE[kind], "FIX": RUN[kind](_fix(task)),
             "TAMPER": RUN[kind](f"echo '{blind}' > tests/__init__.py"),
             "BAD": use("terminal" if kind == "openhands" else "bash", comand="ls")}  # fmt: skip

    def script(reply: Any) -> Any:
        if not isinstance(reply, str):
            return reply
        return named.get(reply) or RUN[kind](reply.removeprefix("RUN "))

    (trial,), _ = _run(
        kind, "bwrap", nano, [task], [script(reply) for reply in replies], tmp_path, **settings
    )
    assert (trial.stop, trial.outcome) == (stop, outcome), (trial.error, trial.messages[-3:])
    assert (trial.try_ == 2) is (outcome is Outcome.INFRA_ERROR)  # tried three times


def test_text_alone(nano: Path, task: Task, tmp_path: Path) -> None:
    """OpenHands takes it for the end, mini asks for a tool call three times."""
    (trial,), _ = _run("openhands", "bwrap", nano, [task], ["no"], tmp_path / "a")
    assert (trial.stop, trial.agent["model_calls"]) == (Stop.PLAIN_TEXT, 1)
    (trial,), _ = _run("mini", "bwrap", nano, [task], ["no"] * 5, tmp_path / "b")
    assert (trial.stop, trial.agent["model_calls"]) == (Stop.PLAIN_TEXT, 3)


def test_a_program_that_fails(nano: Path, task: Task, tmp_path: Path) -> None:
    def end(name: str, scripts: Sequence[Script | str], **settings: Any) -> Trial:
        (tmp_path / name).mkdir()
        (trial,), _ = _run("command", "bwrap", nano, [task], scripts, tmp_path / name, **settings)
        return trial

    trial = end("absent", [], command="claude -p hello")
    assert trial.outcome is Outcome.INFRA_ERROR and "cannot be run" in trial.error
    trial = end("crash", [], command="exit 3")
    assert (trial.stop, trial.outcome) == (Stop.FINISHED, Outcome.NO_PATCH)
    assert trial.agent["exit_code"] == 3
    trial = end("turns", [RUN["command"]("true")] * 5, max_turns=2)
    assert (trial.stop, trial.agent["model_calls"]) == (Stop.MAX_TURNS, 2)
    trial = end("context", ["x"], max_context=50)
    assert (trial.stop, trial.outcome) == (Stop.CONTEXT, Outcome.NO_PATCH)
    trial = end("engine", [Script("x", fail_after=0)] * 3)
    assert trial.outcome is Outcome.INFRA_ERROR and "HTTP 5" in trial.error
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    trial = end("elsewhere", [], command=f'python3 -c "{connect}"')
    assert "unreachable" in trial.agent["output"]
    trial = end("hangs", [RUN["command"]("sleep 99")], agent_sec=5)
    assert (trial.stop, trial.outcome) == (Stop.TIMEOUT, Outcome.NO_PATCH)
