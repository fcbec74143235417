"""The closed world of tests that expect a network: httpbin with TLS, and a black hole; no more."""

import asyncio
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_harbor.task import Task

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[3]
IMAGE = "nanoswe/fixture:dev"
SCRIPT = """
import socket, ssl, time, urllib.request

trusting = ssl.create_default_context(cafile="/nanoswe-ca.pem")
for url in ("http://httpbin.org/get?a=1", "https://httpbin.org/get?a=1"):
    print(b'"a":"1"' in urllib.request.urlopen(url, timeout=60, context=trusting).read())
for address in ("10.255.255.1", "192.0.2.1"):
    try:
        socket.create_connection((address, 80), 1)
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_task_of_requests_has_them_and_nothing_else(task: Task, tmp_path: Path) -> None:
    subprocess.run(["docker", "build", "-q", "-t", IMAGE, ROOT / "docker/fixture"], check=True)
    factory = SandboxFactory("docker", tmp_path / "work", None, Limits(timeout_sec=120))

    async def main(repo: str) -> str:
        async with factory.open(replace(task, repo=repo, docker_image=IMAGE)) as sandbox:
            done = await sandbox.run(["python3", "-c", SCRIPT], cwd="/")
        return done.stdout.decode()

    seen = asyncio.run(main("psf/requests")).split()
    assert seen == ["True", "True", "TimeoutError", "OSError"]
    assert "FileNotFoundError" in asyncio.run(main("psf/other"))
    command = ["docker", "ps", "-aq", "--filter", f"label=nanoswe.task={task.task_id}"]
    left = subprocess.run(command, capture_output=True, text=True, check=True)
    assert left.stdout == ""
