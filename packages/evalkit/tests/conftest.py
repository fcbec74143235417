"""Real nano tasks, made once, and a factory of real sandboxes."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanoswe_evalkit import runner
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_harbor.convert import convert_nano
from nanoswe_harbor.task import Task, load_tasks

if TYPE_CHECKING:
    from contract_server import Server

# In an environment of its own, with the proxy: `nox --session agents`.
collect_ignore = [] if find_spec("nanoswe_proxy") else ["test_agents.py", "test_proxied.py"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PAUSE_SEC", 0.05)


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "nano"
    convert_nano(folder, {"train": 3, "heldout": 2})
    return folder


@pytest.fixture(scope="session")
def tasks(nano: Path) -> list[Task]:
    return load_tasks(nano / "train")


@pytest.fixture(scope="session")
def task(tasks: list[Task]) -> Task:
    return tasks[0]


@pytest.fixture
def sandboxes(nano: Path, tmp_path: Path) -> SandboxFactory:
    limits = Limits(timeout_sec=20, memory_mb=512, processes=24, output_bytes=4096, file_mb=8)
    return SandboxFactory("bwrap", tmp_path / "work", nano / "mirror", limits)


@pytest.fixture(scope="session")
def daytona_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Server"]:
    import contract_server  # what it needs comes with the extra

    with contract_server.running(tmp_path_factory.mktemp("daytona")) as server:
        yield server


@pytest.fixture
def daytona(daytona_server: "Server", monkeypatch: pytest.MonkeyPatch) -> Iterator["Server"]:
    """An account that a test finds empty, and has to leave so."""
    monkeypatch.setenv("DAYTONA_API_KEY", daytona_server.key)
    monkeypatch.setenv("DAYTONA_API_URL", f"{daytona_server.url}/api")
    daytona_server.requests.clear()
    daytona_server.faults.clear()
    yield daytona_server
    assert not daytona_server.boxes
