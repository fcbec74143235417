"""Real nano tasks, made once, and a factory of real sandboxes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_harbor.convert import convert_nano
from nanoswe_harbor.task import Task, load_tasks

# In an environment of its own, with the proxy: `nox --session agents`.
collect_ignore = [] if find_spec("nanoswe_proxy") else ["test_agents.py", "test_proxied.py"]


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
