"""image ls, size and prune, by the real docker, which here sees this test's images alone."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanoswe_harbor.task import load_tasks

pytestmark = pytest.mark.interop
EXCERPT = Path(__file__).parent / "data" / "verified_excerpt.jsonl"
CLI = [sys.executable, "-m", "nanoswe_harbor"]
MIB = 2**20
Run = Callable[..., list[list[str]]]


@pytest.fixture
def label(tmp_path: Path) -> Iterator[str]:
    """Of the images that a test builds; docker's `image ls` shows no others (prune removes)."""
    label = f"nanoswe-test={uuid.uuid4()}"
    docker, shim = shutil.which("docker"), tmp_path / "bin/docker"
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "image ls" ]; then set -- "$@" --filter label={label}; fi\n'
        f'exec {docker} "$@"\n'
    )
    shim.chmod(0o755)
    yield label
    listed = subprocess.run([shim, "image", "ls", "--quiet"], capture_output=True, check=True)
    if ids := {*listed.stdout.decode().split()}:
        subprocess.run(["docker", "image", "rm", "--force", *ids], check=True, capture_output=True)


@pytest.fixture
def run(tmp_path: Path, label: str) -> Run:
    """The fields of each line that `nanoswe-harbor image …` prints."""

    def run(*argv: str | Path) -> list[list[str]]:
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            [*CLI, "image", *argv], capture_output=True, text=True, env=env, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return [line.split("  ") for line in done.stdout.splitlines()]

    return run


def build(folder: Path, label: str, tags: list[str], *steps: tuple[str, int]) -> None:
    """An image with a layer for each destination, of so many bytes."""
    folder.mkdir()
    lines = ["FROM scratch", f"LABEL {label}"]
    for to, size in steps:
        (folder / to[1:]).mkdir(parents=True)
        (folder / to[1:] / "file").write_bytes(os.urandom(size))
        lines.append(f"COPY {to} {to}")
    (folder / "Dockerfile").write_text("\n".join(lines))
    named = [f"--tag={tag}" for tag in tags]
    subprocess.run(["docker", "build", "-q", *named, folder], check=True, capture_output=True)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    out = tmp_path / "tasks"
    argv = [*CLI, "convert", EXCERPT, "--out", out, "--images", "built"]
    subprocess.run(argv, check=True, capture_output=True)
    return out


def test_nothing_is_there(run: Run, tasks: Path) -> None:
    assert run("ls") == [] and run("prune", tasks) == [] and run("prune", tasks, "--yes") == []
    assert run("size") == [["all", "0", "0"]]


def test_ls_and_size(tmp_path: Path, label: str, run: Run) -> None:
    python, env = ("/opt/python", 2 * MIB), ("/opt/miniconda3/envs/testbed", MIB)
    build(tmp_path / "a", label, ["nanoswe/env:test-a", "nanoswe/env:test-b"], python, env)
    build(tmp_path / "c", label, ["nanoswe/task:test-c"], ("/testbed", 3 * MIB))
    assert [row[-1] for row in run("ls")] == [
        "nanoswe/env:test-a", "nanoswe/env:test-b", "nanoswe/task:test-c"
    ]  # fmt: skip
    kinds = {kind: (int(layers), int(size)) for kind, layers, size in run("size")}
    sizes = {"environment": (1, MIB), "python": (1, 2 * MIB), "checkout": (1, 3 * MIB)}
    assert kinds == {**sizes, "all": (3, 6 * MIB)}


def test_prune_keeps_what_a_task_names(tmp_path: Path, label: str, run: Run, tasks: Path) -> None:
    first, second, third = load_tasks(tasks)
    for file in (first.path / "task.toml", first.path / "environment/Dockerfile"):
        text = file.read_text()
        pinned = f"{first.docker_image}@sha256:{'0' * 64}"
        file.write_text(text.replace(first.docker_image, pinned))
    own = f"nanoswe/task:{third.task_id.lower()}"
    images = [
        [first.docker_image, "nanoswe/env:test-alias"], [second.docker_image], [own],
        ["nanoswe/env:test-old", "nanoswe/env:test-older"], ["nanoswe/task:test-old"],
        ["nanoswe/proxy:test-dev"],
    ]  # fmt: skip
    for number, tags in enumerate(images):
        build(tmp_path / f"image{number}", label, tags, ("/a", 1))
    old = [["nanoswe/env:test-old"], ["nanoswe/env:test-older"], ["nanoswe/task:test-old"]]
    before = [row[-1] for row in run("ls")]
    assert sorted(run("prune", tasks)) == old and [row[-1] for row in run("ls")] == before
    assert sorted(run("prune", tasks, "--yes")) == old
    kept = {name for tags in images for name in tags} - {name for (name,) in old}
    assert {row[-1] for row in run("ls")} == kept
