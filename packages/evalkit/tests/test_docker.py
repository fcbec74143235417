"""docker alone: what a killed harness leaves is swept away by the next one."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nanoswe_evalkit.sandboxes import SandboxFactory, pick
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_harbor.task import Task

pytestmark = pytest.mark.interop
LEAVE = """
import asyncio, os, signal, sys
from dataclasses import replace
from pathlib import Path
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_harbor.task import load_tasks

async def main():
    task = replace(load_tasks(sys.argv[1])[0], docker_image="debian:bookworm-slim")
    mirror = Path(sys.argv[1]).parent / "mirror"
    factory = SandboxFactory("docker", Path(sys.argv[2]), mirror, Limits())
    async with factory.open(replace(task, task_id="left-behind")):
        print("up", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def _left() -> list[str]:
    command = ["docker", "ps", "-aq", "--filter", "label=nanoswe.task=left-behind"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_killed_harness_leaves_nothing_for_long(nano: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVE, str(nano / "train"), str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        asyncio.run(pick("docker", tmp_path))
        assert len(_left()) == 1  # its harness lives
        process.kill()
        process.wait()
    assert len(_left()) == 1
    asyncio.run(pick("docker", tmp_path))
    assert _left() == []


def test_the_grader_starts_while_the_agent_works(nano: Path, tmp_path: Path, task: Task) -> None:
    task = replace(task, task_id="left-behind", docker_image="debian:bookworm-slim")
    factory = SandboxFactory("docker", tmp_path / "work", nano / "mirror", Limits())

    async def main() -> None:
        async with factory.ahead(task) as pristine:
            async with factory.open(task) as agents:
                await agents.run(["sleep", "2"])
                await agents.run(["touch", "agent-was-here"])
                assert len(await asyncio.to_thread(_left)) == 2
            began = time.monotonic()
            async with pristine() as grader:
                assert time.monotonic() - began < 0.1
                assert (await grader.run(["ls", "agent-was-here", "README.md"])).exit_code == 2
            async with pristine() as another:  # for the whole patch
                assert another is not grader
        assert _left() == []
        async with factory.ahead(task):  # nothing to grade
            pass
        assert _left() == []

    asyncio.run(main())
