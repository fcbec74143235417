"""Two ranks as actors and trials as tasks of a Ray cluster of this machine; killed, and resumed.
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

pytestmark = pytest.mark.interop
RECIPE = """
name: ray
tasks: {path: TASKS/train, limit: 2}
agent: {max_turns: 2}
model: {max_tokens: 8}
eval: {attempts: 1, concurrency: 2}
sft: {steps: 2, batch: 4, warmup_steps: 1, muon_learning_rate: 0}
train: {steps: 3, groups: 1, group_size: 2, checkpoint_steps: 1, preset: distill, teacher: TASKS/t}
cluster: {backend: ray, ranks: 2, train_threads: 1, max_context: 128}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a program that finds it."""
    address = free_address()
    ray = Path(sys.executable).with_name("ray")
    head = subprocess.Popen(
        [str(ray), "start", "--head", "--block", "--port", address.rpartition(":")[2],
         "--num-cpus", "3", "--include-dashboard", "false", "--object-store-memory", "100000000",
         "--temp-dir", str(tmp_path_factory.mktemp("ray"))],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    env = os.environ | {"RAY_ADDRESS": address}
    deadline = time.monotonic() + 120
    while subprocess.run([str(ray), "health-check", "--address", address], check=False,
                         capture_output=True).returncode:  # fmt: skip
        assert time.monotonic() < deadline and head.poll() is None
        time.sleep(1)
    yield env
    os.killpg(head.pid, signal.SIGTERM)
    head.wait(60)


def test_a_run_on_ray_is_killed_and_resumed(cluster: dict[str, str], tmp_path: Path) -> None:
    convert_nano(tmp_path / "tasks", {"train": 2, "heldout": 1})
    tiny.create(tmp_path / "tasks/t", seed=5)  # each step learns, whatever the rewards
    recipe = tmp_path / "ray.yaml"
    recipe.write_text(RECIPE.replace("TASKS", str(tmp_path / "tasks")))
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(recipe), "--runs",
               str(tmp_path), "--allowlist-fallback"]  # fmt: skip
    run = tmp_path / "ray"
    child = subprocess.Popen(command, env=cluster, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (run / "checkpoints/rl-00001.pt").exists():
        time.sleep(0.05)
    child.kill()
    assert child.wait() == -9
    done = subprocess.run(
        command, env=cluster, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["stage"] == "rl"] == [1, 2, 3]
    trials = [
        json.loads(line)["trial_id"] for line in (run / "trials.jsonl").read_text().splitlines()
    ]
    assert len(trials) == len(set(trials)) == 2 + 3 * 2 + 2
    assert (run / "export/model.safetensors").exists()
