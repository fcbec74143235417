"""`cluster.backend=ray` on a real local cluster of three nodes, one of which is killed mid-run."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.interop
RECIPE = """
name: far
tasks: {{path: {tasks}}}
agent: {{kind: oracle}}
sandbox: {{kind: bwrap}}
eval: {{attempts: {attempts}, concurrency: 6}}
cluster: {{backend: ray}}
"""


@contextmanager
def _cluster(nodes: int) -> Iterator[tuple[str, Any]]:
    """A head that has no memory to give, and nodes with room for two trials; (address, stdin)."""
    command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py")), "2.5", str(nodes)]
    env = {**os.environ, "RAY_raylet_start_wait_time_s": "150"}  # of a busy machine
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:
        while not re.fullmatch(r"[\d.]+:\d+\n", address := process.stdout.readline()):
            assert process.poll() is None
        yield address.strip(), process.stdin


def _start(folder: Path, nano: Path, address: str, attempts: int) -> subprocess.Popen[str]:
    text = RECIPE.format(tasks=nano / "train", attempts=attempts)
    (folder / "r.yaml").write_text(text)
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", str(folder / "r.yaml"), "--json"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "RAY_ADDRESS": address}, **pipes
    )


def test_a_lost_nodes_trials_run_elsewhere(nano: Path, tmp_path: Path) -> None:
    record = tmp_path / "runs" / "far" / "trials.jsonl"
    with _cluster(2) as (address, kill):
        run = _start(tmp_path, nano, address, attempts=8)
        told: list[str] = []
        reader = threading.Thread(target=lambda: told.extend(run.communicate()))
        reader.start()
        deadline = time.monotonic() + 180
        while not record.exists() or record.read_bytes().count(b"\n") < 4:
            assert time.monotonic() < deadline and run.poll() is None, told
            time.sleep(0.1)
        kill.write("one\n")
        kill.flush()
        reader.join(300)
    assert run.returncode == 0, told
    trials = [json.loads(line) for line in record.read_text().splitlines()]
    assert Counter(trial["outcome"] for trial in trials) == {"resolved": 24}
    assert len({trial["trial_id"] for trial in trials}) == 24
    assert any(trial["try_"] for trial in trials)  # it took trials with it
    assert not (tmp_path / "runs" / "far" / "work").exists()


def test_what_no_node_has_room_for_is_said(nano: Path, tmp_path: Path) -> None:
    with _cluster(0) as (address, _):
        out, err = _start(tmp_path, nano, address, attempts=1).communicate(timeout=180)
    assert json.loads(out)["outcomes"] == {"infra_error": 3}
    assert "ray: no node has 1024 MB" in err
