"""daytona alone, by the real client: what the service is asked for, and what goes wrong there."""

import asyncio
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import daytona as sdk
import pytest
from _pytest.mark import ParameterSet
from contract_server import Fault, Server

from nanoswe_evalkit.agents.base import ModelConfig, OracleAgent
from nanoswe_evalkit.outcome import Outcome
from nanoswe_evalkit.sandboxes import SandboxFactory, base, pick
from nanoswe_evalkit.sandboxes import daytona as module
from nanoswe_evalkit.sandboxes.base import Limits, Sandbox, SandboxError
from nanoswe_evalkit.trial import run_trial
from nanoswe_harbor.task import Task

Body = Callable[[Sandbox], Awaitable[None]]
CREATE, EXECUTE = "POST /api/sandbox$", "POST .*/process/execute$"
ONCE = ["sh", "-c", "echo ran >> /tmp/ran; sleep 0.2; cat /tmp/ran; exit 3"]


@pytest.fixture
def factory(daytona: Server, tmp_path: Path) -> SandboxFactory:
    return SandboxFactory("daytona", tmp_path / "work", None, Limits(timeout_sec=20))


def _inside(factory: SandboxFactory, task: Task, body: Body) -> None:
    async def main() -> None:
        async with factory.open(task) as sandbox:
            await body(sandbox)

    asyncio.run(main())


def test_what_is_asked_for(daytona: Server, factory: SandboxFactory, task: Task) -> None:
    task = replace(task, docker_image="some/image:tag-1")
    daytona.snapshots.clear()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for opened in [factory.open(task) for _ in range(3)]:
                await stack.enter_async_context(opened)
            await stack.enter_async_context(factory.open(replace(task, docker_image="other:2")))
            assert len({box.dto["name"] for box in daytona.boxes.values()}) == 4

    asyncio.run(main())
    creates = daytona.bodies("POST /api/sandbox")
    minutes = math.ceil((task.agent_timeout_sec + task.verifier_timeout_sec) / 60)
    for body in creates:
        assert body["networkBlockAll"] is True and "networkAllowList" not in body
        assert (body["autoStopInterval"], body["autoDeleteInterval"]) == (0, 0)
        assert body["ttlMinutes"] == minutes + 60
        owner = f"{socket.gethostname()}/{os.getpid()}"
        assert body["labels"][base.TASK] == task.task_id and body["labels"][base.OWNER] == owner
    snapshots = daytona.bodies("POST /api/snapshots")
    bases = [snapshot["buildInfo"]["dockerfileContent"] for snapshot in snapshots]
    assert bases == ["FROM some/image:tag-1\n", "FROM other:2\n"]
    names = [snapshot["name"] for snapshot in snapshots]
    assert all(re.fullmatch(r"nanoswe-[0-9a-f]{32}", name) for name in names)
    assert [body["snapshot"] for body in creates] == [names[0]] * 3 + [names[1]]
    assert snapshots[0]["memory"] == 1


@pytest.mark.interop
def test_a_folder_with_a_dockerfile_is_its_content(
    daytona: Server, factory: SandboxFactory, task: Task, tmp_path: Path
) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "Dockerfile").write_text("FROM debian:12\nRUN true\n")
    task = replace(task, docker_image=str(tmp_path / "image"))

    async def nothing(sandbox: Sandbox) -> None: ...

    _inside(factory, task, nothing)
    (made,) = daytona.bodies("POST /api/snapshots")
    assert made["buildInfo"]["dockerfileContent"] == "FROM debian:12\nRUN true\n"
    _inside(factory, task, nothing)
    assert len(daytona.bodies("POST /api/snapshots")) == 1
    (tmp_path / "image" / "Dockerfile").write_text("FROM debian:12\nRUN false\n")
    _inside(factory, task, nothing)
    assert len({body["name"] for body in daytona.bodies("POST /api/snapshots")}) == 2


def _every_trouble() -> Iterator[ParameterSet]:
    """Of these the fast tier has those where an answer is lost that matters most."""
    get = "GET /api/sandbox$"
    for pattern in (CREATE, EXECUTE, "bulk-upload", "bulk-download", "DELETE", get, "snapshots"):
        for kind in ("429", "502", "dropped-before", "dropped-after"):
            fast = kind == "dropped-after" and pattern in (CREATE, EXECUTE, "bulk-upload")
            yield pytest.param(pattern, kind, marks=() if fast else pytest.mark.interop)


@pytest.mark.parametrize(("pattern", "kind"), list(_every_trouble()))
def test_trouble_passes_and_nothing_runs_twice(
    daytona: Server, factory: SandboxFactory, task: Task, pattern: str, kind: str
) -> None:
    daytona.snapshots.clear()
    daytona.faults.append(Fault(pattern, kind, 2))

    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(ONCE)
        assert (done.stdout, done.exit_code) == (b"ran\n", 3)

    _inside(factory, task, body)
    assert daytona.faults[0].times == 0 and not daytona.boxes
    names = {body["name"] for body in daytona.bodies("POST /api/sandbox")}
    assert len(names) == 1 and len(daytona.snapshots) == 1


@pytest.mark.interop
@pytest.mark.parametrize("kind", ["502", "dropped-before", "dropped-after"])
def test_an_answer_lost_while_it_runs(
    daytona: Server, factory: SandboxFactory, task: Task, kind: str
) -> None:
    async def body(sandbox: Sandbox) -> None:
        daytona.faults.append(Fault(EXECUTE, kind, 3))
        done = await sandbox.run(ONCE)
        assert (done.stdout, done.exit_code) == (b"ran\n", 3)
        done = await sandbox.run(ONCE, timeout_sec=0.05)
        assert done.timed_out

    _inside(factory, task, body)


def test_a_stuck_create_is_given_up_and_swept(
    daytona: Server, factory: SandboxFactory, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CREATE_SEC", 1)
    daytona.faults.append(Fault(CREATE, "stuck"))

    async def body(sandbox: Sandbox) -> None: ...

    with pytest.raises(SandboxError, match="'create' exceeded timeout of 1 seconds"):
        _inside(factory, task, body)
    assert daytona.count(CREATE) == 1 and not daytona.boxes


def test_a_lost_delete_is_swept(daytona: Server, factory: SandboxFactory, task: Task) -> None:
    daytona.faults.append(Fault("DELETE", "lost", 2))

    async def body(sandbox: Sandbox) -> None: ...

    _inside(factory, task, body)
    assert daytona.count("DELETE") == 3 and not daytona.boxes


def test_a_quota_is_no_rate_limit(daytona: Server, factory: SandboxFactory, task: Task) -> None:
    async def body(sandbox: Sandbox) -> None: ...

    daytona.faults.append(Fault(CREATE, "quota"))
    with pytest.raises(SandboxError, match=r"Total disk limit .*; no rate limit: lower eval"):
        _inside(factory, task, body)
    assert daytona.count(CREATE) == 1
    daytona.faults[:] = [Fault(CREATE, "429", 99)]
    with pytest.raises(SandboxError, match="429: .*Rate limit exceeded$"):
        _inside(factory, task, body)
    assert daytona.count(CREATE) == 1 + module.TRIES


@pytest.mark.interop
def test_trouble_that_stays_is_an_error(
    daytona: Server, factory: SandboxFactory, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRIES", 3)

    async def body(sandbox: Sandbox) -> None:
        daytona.faults.append(Fault(EXECUTE, "502", 3))
        await sandbox.run(ONCE)

    with pytest.raises(SandboxError, match="502: .*Failed to execute command"):
        _inside(factory, task, body)


@pytest.mark.interop
def test_creates_take_turns(
    daytona: Server, factory: SandboxFactory, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BURST", 2)

    async def one() -> float:
        async with factory.open(task):
            return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        began = asyncio.get_running_loop().time()
        return sorted([at - began for at in await asyncio.gather(*(one() for _ in range(6)))])

    assert asyncio.run(main())[-1] > 4 / module.CREATES_PER_SEC  # the first two at once


@pytest.mark.interop
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DAYTONA_API_KEY", "", "set DAYTONA_API_KEY"),
        ("DAYTONA_API_KEY", "dtn_wrong", "401: .*set DAYTONA_API_KEY to a key that works"),
        ("DAYTONA_API_URL", "http://127.0.0.1:9/api", "no answer.*see DAYTONA_API_URL"),
    ],
)
def test_wrong_settings_are_one_line(
    daytona: Server, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, message: str
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    done = _evalkit(tmp_path, nano, "agent.kind=oracle")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(message, done.stderr), done.stderr


def test_an_agent_inside_is_refused(daytona: Server, nano: Path, tmp_path: Path) -> None:
    options = ("agent.kind=command", "agent.command=x", "model.base_url=http://127.0.0.1:9/v1")
    done = _evalkit(tmp_path, nano, *options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "choose bwrap or docker" in done.stderr and not daytona.requests


def test_what_a_killed_harness_left_is_swept(daytona: Server, tmp_path: Path, task: Task) -> None:
    host = socket.gethostname()
    daytona.snapshots["nanoswe-x"] = {"state": "active", "id": "x", "name": "nanoswe-x"}

    async def main() -> set[str]:
        async with sdk.AsyncDaytona() as client:
            for owner in (f"{host}/{os.getpid()}", f"{host}/999999999", "elsewhere/999999999"):
                labels = {module.ANY: "1", module.RUN: "other", base.OWNER: owner}
                params = sdk.CreateSandboxFromSnapshotParams(
                    name=f"nanoswe-{owner.replace('/', '-')}",
                    snapshot="nanoswe-x",
                    labels=labels,
                    network_block_all=True,
                    auto_stop_interval=0,
                    auto_delete_interval=0,
                )
                await client.create(params)
            assert await pick("daytona", tmp_path) == "daytona"
            left = {box.dto["labels"][base.OWNER] for box in daytona.boxes.values()}
            async for box in client.list():
                await box.delete()
        return left

    assert asyncio.run(main()) == {f"{host}/{os.getpid()}", "elsewhere/999999999"}


def test_a_command_can_read_neither_its_log_nor_its_input_again(
    factory: SandboxFactory, task: Task
) -> None:
    async def body(sandbox: Sandbox) -> None:
        script = "cat >/dev/null; echo no''nce; cat /tmp/.nanoswe/*; cat /proc/*/fd/0 </dev/null"
        done = await sandbox.run(["timeout", "2", "bash", "-c", script], stdin=b"secret")
        assert done.stdout.count(b"nonce\n") == 1 and b"secret" not in done.stdout

    _inside(factory, task, body)


@pytest.mark.interop
def test_whoever_kills_everything_is_killed(factory: SandboxFactory, task: Task) -> None:
    async def body(sandbox: Sandbox) -> None:
        done = await sandbox.run(["bash", "-c", "kill -9 -1; sleep 60"])
        assert (done.exit_code, done.timed_out) == (137, False)
        done = await sandbox.run(["bash", "-c", "rm -rf /tmp/.nanoswe; sleep 0.5"])
        assert (done.exit_code, done.stdout) == (137, b"")
        assert (await sandbox.run(["echo", "alive"])).stdout == b"alive\n"

    _inside(factory, task, body)


def test_a_whole_trial(daytona: Server, nano: Path, tmp_path: Path, task: Task) -> None:
    factory = SandboxFactory("daytona", tmp_path / "work", nano / "mirror", Limits())
    daytona.faults += [Fault(CREATE, "429"), Fault(EXECUTE, "dropped-after", 2)]
    running = run_trial(
        *(task, 0),
        trial_id="x.0",
        agent=OracleAgent(),
        sandboxes=factory,
        base_url="",
        model=ModelConfig("none"),
    )
    trial = asyncio.run(running)
    assert (trial.outcome, trial.reward, trial.error) == (Outcome.RESOLVED, 1.0, "")


def test_a_run_of_a_recipe(daytona: Server, nano: Path, tmp_path: Path) -> None:
    done = _evalkit(tmp_path, nano, "agent.kind=oracle", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"] == {"resolved": 2}


def _evalkit(cwd: Path, nano: Path, *options: str) -> subprocess.CompletedProcess[str]:
    recipe = f"name: d\ntasks: {{path: {nano / 'heldout'}}}\nsandbox: {{kind: daytona}}\n"
    (cwd / "d.yaml").write_text(recipe)
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", "d.yaml", *options]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
