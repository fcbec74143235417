"""Two ranks and an engine as actors, trials as tasks of a Ray cluster of this machine: engine,
runners and the run itself are killed, and the accounting is that of a run that nobody disturbed.
Collected where ray is installed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoswe_harbor.convert import convert_nano
from nanoswe_trainer import tiny
from nanoswe_trainer.cluster import free_address

KILLS = Path(__file__).with_name("ray_kills.py")
pytestmark = pytest.mark.interop
RECIPE = """
name: ray
tasks: {path: TASKS/train, limit: 2}
agent: {max_turns: 2}
model: {max_tokens: 8}
eval: {attempts: 1, concurrency: 2}
sft: {steps: 2, batch: 4, warmup_steps: 1, muon_learning_rate: 0}
train: {steps: 5, groups: 1, group_size: 2, checkpoint_steps: 1, preset: distill, teacher: TASKS/t}
cluster: {backend: ray, ranks: 2, train_threads: 1, max_context: 128}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a program that finds it."""
    address = free_address()
    ray = Path(sys.executable).with_name("ray")
    # Said aloud: ray turns token authentication on by itself where some program has left a token,
    # and its own health check then sends none.
    env = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    head = subprocess.Popen(
        [str(ray), "start", "--head", "--block", "--port", address.rpartition(":")[2],
         "--num-cpus", "4", "--include-dashboard", "false", "--object-store-memory", "100000000",
         "--temp-dir", str(tmp_path_factory.mktemp("ray"))],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while subprocess.run([str(ray), "health-check", "--address", address], env=env,
                         check=False, capture_output=True).returncode:  # fmt: skip
        assert time.monotonic() < deadline and head.poll() is None
        time.sleep(1)
    yield env
    os.killpg(head.pid, signal.SIGTERM)
    head.wait(60)


def test_runner_engine_and_run_are_killed_and_nothing_is_lost(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    convert_nano(tmp_path / "tasks", {"train": 2, "heldout": 1})
    tiny.create(tmp_path / "tasks/t", seed=5)  # each step learns, whatever the rewards
    recipe = tmp_path / "ray.yaml"
    recipe.write_text(RECIPE.replace("TASKS", str(tmp_path / "tasks")))
    command = [sys.executable, str(KILLS), str(recipe), str(tmp_path)]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"].keys() == {"ray::_run_there", "ray::Host", "the run"}
    assert "resuming" in done.stderr
    assert found["trials"] == 2 + 5 * 2 + 2
    assert found["differ"] == []


def test_an_engine_without_a_place_is_one_line(cluster: dict[str, str], tmp_path: Path) -> None:
    convert_nano(tmp_path / "tasks", {"train": 2, "heldout": 1})
    tiny.create(tmp_path / "tasks/t", seed=5)
    recipe = tmp_path / "ray.yaml"
    text = RECIPE.replace("TASKS", str(tmp_path / "tasks"))
    recipe.write_text(text.replace("ranks: 2", "ranks: 4"))  # the cluster has four CPUs
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(recipe)]
    command += ["--runs", str(tmp_path), "--allowlist-fallback"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=900)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no room for the engine: 1 times {'CPU': 1, 'GPU': 0}" in done.stderr
