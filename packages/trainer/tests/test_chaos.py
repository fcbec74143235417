"""Killed at every named point, disks that fill, data that changes: accounting stays exact."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanoswe_evalkit.recipe import load_recipe
from nanoswe_evalkit.runner import read_trials
from nanoswe_harbor.convert import convert_nano
from nanoswe_proxy.trajectory import from_json
from nanoswe_trainer import tiny
from nanoswe_trainer.data import rl_rows
from nanoswe_trainer.loop_rl import _update
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.worker import open_worker

pytestmark = pytest.mark.interop  # minutes, all told
CRASH = Path(__file__).with_name("crash.py")
RECIPE = """
name: chaos
tasks: {path: TASKS/train, limit: 2}
agent: {max_turns: 2}
model: {max_tokens: 8}
eval: {attempts: 1, concurrency: 4}
sft: {steps: 1, batch: 4, warmup_steps: 1}
train: {steps: 3, groups: 1, group_size: 2, checkpoint_steps: 1, preset: distill, teacher: TASKS/t}
cluster: {train_threads: 1, max_context: 128}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    convert_nano(folder, {"train": 2, "heldout": 1})
    tiny.create(folder / "t", seed=5)  # distillation: whatever the rewards, each step learns
    path = folder / "chaos.yaml"
    path.write_text(RECIPE.replace("TASKS", str(folder)))
    return path


def command(recipe: Path, runs: Path, *overrides: str) -> list[str]:
    run = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(recipe), *overrides]
    return [*run, "--runs", str(runs), "--allowlist-fallback"]


def start(recipe: Path, runs: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(recipe, runs, *overrides), capture_output=True, text=True, timeout=200, check=False
    )


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row.get("loss", row.get("avg_at_k")) for row in rows]


def test_killed_at_every_named_point_the_run_ends_as_if_it_had_not_been(
    recipe: Path, tmp_path: Path
) -> None:
    points = [sys.executable, str(CRASH), str(recipe), str(tmp_path)]
    done = subprocess.run(points, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 12
    assert found == {name: {"signal": 9, "resumed": 0, "differ": []} for name in found}


@pytest.mark.parametrize("file", ["checkpoints/rl-00002.tmp", "metrics.jsonl"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    recipe: Path, tmp_path: Path, file: str
) -> None:
    full = tmp_path / "chaos" / file
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    done = start(recipe, tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.strip().splitlines()[-1]
    full.unlink(missing_ok=True)
    done = start(recipe, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "chaos")) == 1 + 2 + 3 + 2  # SFT, evaluation, RL, evaluation


def test_another_task_is_refused_another_machine_is_not(recipe: Path, tmp_path: Path) -> None:
    """R3: begun alone, ended on two ranks, within 1e-5 of a run that was alone."""
    first = start(recipe, tmp_path / "a")
    assert first.returncode == 0, first.stderr
    child = subprocess.Popen(command(recipe, tmp_path), stderr=subprocess.DEVNULL)
    while child.poll() is None and not (tmp_path / "chaos/checkpoints/rl-00001.pt").exists():
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -9
    again = start(recipe, tmp_path, "cluster.ranks=2", "cluster.max_tokens=256")
    assert again.returncode == 0, again.stderr
    assert "resuming" in again.stderr
    assert losses(tmp_path / "chaos") == pytest.approx(losses(tmp_path / "a/chaos"), rel=1e-5)
    for split in ("train", "heldout"):
        issue = next(recipe.parent.glob(f"{split}/*/instruction.md"))
        before = issue.read_text()
        issue.write_text(before + "\nAnd be quick.\n")
        try:
            refused = start(recipe, tmp_path)
        finally:
            issue.write_text(before)
        assert refused.returncode == 2
        assert "from other data" in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_the_trainer_alone_replays_a_step_from_its_records(recipe: Path, tmp_path: Path) -> None:
    """R0: a checkpoint and the recorded trials give the next checkpoint, bit for bit."""
    run = tmp_path / "chaos"
    child = subprocess.Popen(command(recipe, tmp_path), stderr=subprocess.DEVNULL)
    while child.poll() is None and not (run / "checkpoints/rl-00002.pt").exists():
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -9
    loaded, folder = load_recipe(recipe, [], TrainRecipe), run / "checkpoints"
    torch.set_num_threads(1)
    (folder / "latest").write_text("rl-00001.pt")
    name = torch.load(folder / "rl-00001.pt", weights_only=True)["recipe"]
    worker = open_worker(loaded, run / "model")
    worker.begin(learning_rate=loaded.train.learning_rate, reference=loaded.train.teacher)
    worker.load(folder, name, optimizers=True)
    trials = [t for t in read_trials(run / "trials.jsonl") if t.trial_id.startswith("s00001.")]
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    sealed = {t.trial_id: t for t in map(from_json, lines)}
    assert len(trials) == 2
    batch = rl_rows([trials], sealed, loaded.train, loaded.cluster.max_context)
    assert _update(loaded, worker, batch, 1)["trained_tokens"] > 0
    want = torch.load(folder / "rl-00002.pt", weights_only=True)["state"]["model"]
    for parameter, value in worker.decoder.named_parameters():
        assert torch.equal(value, want[parameter]), parameter
