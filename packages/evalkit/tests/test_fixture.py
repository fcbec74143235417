"""The closed world of tests that expect a network: httpbin with TLS, and a black hole; no more."""

import asyncio
import os
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits, SandboxError
from nanoswe_harbor.task import Task
from nanoswe_harbor.unpack import unpack

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[3]
IMAGE = "nanoswe/fixture:dev"
TESTS = "nanoswe-test/closed-world:dev"  # has a Python, and where a checkout goes
SCRIPT = """
import socket, ssl, urllib.request

trusting = ssl.create_default_context(cafile="/etc/nanoswe-ca.pem")
for host in ("httpbin.org", "httpbin.org", "www.google.co.uk"):
    url = f"http://{host}/get?a=1"
    print(b'"a":"1"' in urllib.request.urlopen(url, timeout=60).read())
url = "https://httpbin.org/get?a=1"
print(b'"a":"1"' in urllib.request.urlopen(url, timeout=60, context=trusting).read())
for address in ("10.255.255.1", "192.0.2.1"):
    try:
        socket.create_connection((address, 80), 1)
    except OSError as error:
        print(type(error).__name__)
"""
KILL = "kill -9 -1; true"  # what plays the network is out of the tests' reach


def _left(task_id: str, store: Path) -> list[str]:
    """Containers of a task, and processes that show a store."""
    command = ["docker", "ps", "-aq", "--filter", f"label=nanoswe.task={task_id}"]
    left = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            left += [path.parent.name] * (f"{store}/".encode() in path.read_bytes())
    return left


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both images, in Docker and unpacked."""
    folder = tmp_path_factory.mktemp("images")
    subprocess.run(["docker", "build", "-q", "-t", IMAGE, ROOT / "docker/fixture"], check=True)
    lines = f"FROM {IMAGE}\nRUN mkdir /testbed\n"
    build = ["docker", "build", "-q", "-t", TESTS, "-"]
    subprocess.run(build, input=lines, text=True, check=True)
    for name in (IMAGE, TESTS):
        saved = folder / "saved.tar"
        subprocess.run(["docker", "save", "-o", saved, name], check=True)
        unpack(str(saved), folder / "store")
        saved.unlink()
    return folder / "store"


@pytest.fixture
def mirror(nano: Path, task: Task, tmp_path: Path) -> Path:
    """A nano repository, as requests and as another one."""
    for owner in ("psf", "other"):
        bare = tmp_path / "mirror" / owner / "requests.git"
        bare.parent.mkdir(parents=True)
        bare.symlink_to(nano / "mirror" / f"{task.repo}.git")
    return tmp_path / "mirror"


@pytest.mark.parametrize("kind", ["docker", "bwrap"])
def test_a_task_of_requests_has_them_and_nothing_else(
    kind: str, task: Task, mirror: Path, store: Path, tmp_path: Path
) -> None:
    limits = Limits(timeout_sec=120, memory_mb=4096, images=str(store))
    factory = SandboxFactory(kind, tmp_path / "work", mirror, limits)
    task = replace(task, task_id=f"closed-world-{os.getpid()}", docker_image=TESTS)

    async def main(repo: str, *commands: list[str]) -> str:
        async with factory.open(replace(task, repo=repo)) as sandbox:
            done = [await sandbox.run(command) for command in commands]
        return done[-1].stdout.decode()

    script = ["python3", "-c", SCRIPT]
    seen = asyncio.run(main("psf/requests", ["sh", "-c", KILL], script)).split()
    assert seen == ["True"] * 4 + ["TimeoutError", "OSError"]
    assert "FileNotFoundError" in asyncio.run(main("other/requests", script))
    assert _left(task.task_id, store) == []


def test_a_store_without_it_says_what_to_do(task: Task, mirror: Path, tmp_path: Path) -> None:
    factory = SandboxFactory("bwrap", tmp_path / "work", mirror, Limits(images=str(tmp_path)))

    async def main() -> None:
        async with factory.open(replace(task, repo="psf/requests", docker_image="")):
            pass

    with pytest.raises(SandboxError, match="image unpack nanoswe/fixture:dev --store"):
        asyncio.run(main())
