"""Whole runs at toy size through the real parts: same seed same numbers, killed and resumed the
same, wrong input.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.recipe import load_recipe
from nanoswe_harbor.convert import convert_nano
from nanoswe_trainer import checkpoint
from nanoswe_trainer.cli import cli
from nanoswe_trainer.model import load_decoder
from nanoswe_trainer.recipe import TrainRecipe

RECIPE = """
name: toy
tasks: {path: TASKS/train, limit: 2}
agent: {max_turns: 3}
model: {max_tokens: 12}
eval: {attempts: 2, concurrency: 8}
sft: {steps: 3, batch: 4, warmup_steps: 1}
train: {steps: 2, groups: 2, group_size: 2, checkpoint_steps: 1, truncated: train}
cluster: {train_threads: 1, max_context: 160}
"""
TIMES = {"time_sec", "step_sec", "wait_sec", "tokens_per_sec", "trials_per_sec"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    convert_nano(folder, {"train": 4, "heldout": 2})
    path = folder / "toy.yaml"
    path.write_text(RECIPE.replace("TASKS", str(folder)))
    return path


def command(recipe: Path, runs: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "nanoswe_trainer.cli",
        "run",
        str(recipe),
        *overrides,
        "--runs",
        str(runs),
    ]


def numbers(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def tokens(run: Path) -> dict[str, list]:
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["trial_id"]: [s["tokens"] for s in r["samples"]] for r in records}


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [*command(recipe, runs), "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["before"]["sampled"]["tasks"] == 2
    assert Path(summary["report"]).read_text().startswith("<!doctype html>")
    return runs / "toy"


def test_the_same_seed_gives_the_same_numbers(recipe: Path, finished: Path, tmp_path: Path) -> None:
    subprocess.run(command(recipe, tmp_path), check=True, capture_output=True, timeout=300)
    assert numbers(tmp_path / "toy") == numbers(finished)
    assert tokens(tmp_path / "toy") == tokens(finished)
    first, again = (
        load_decoder(run / "export").state_dict() for run in (finished, tmp_path / "toy")
    )
    assert all((first[k] == again[k]).all() for k in first)


def test_killed_and_resumed_gives_the_same_numbers(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    want = len(numbers(finished))
    run = tmp_path / "toy"
    for kill_after in (2, 6):  # before the first checkpoint, and in RL or after
        child = subprocess.Popen(
            command(recipe, tmp_path), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists() and len(numbers(run)) >= min(kill_after, want - 1):
                child.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        child.wait(60)
    subprocess.run(command(recipe, tmp_path), check=True, capture_output=True, timeout=300)
    assert numbers(run) == numbers(finished)
    assert tokens(run) == tokens(finished)


def test_an_evaluation_that_was_killed_goes_on(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "toy"
    trials = run / "trials.jsonl"
    child = subprocess.Popen(command(recipe, tmp_path), stderr=subprocess.DEVNULL)
    while child.poll() is None and not (trials.exists() and trials.read_text().count("\n") > 1):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    recorded = trials.read_text().split("\n")[:-1]
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"trial_id": "torn')
    subprocess.run(command(recipe, tmp_path), check=True, capture_output=True, timeout=300)
    assert trials.read_text().split("\n")[: len(recorded)] == recorded
    assert numbers(run) == numbers(finished)
    for name in ("trials.jsonl", "trajectories.jsonl"):
        lines = [(folder / name).read_text().splitlines() for folder in (run, finished)]
        ids = [sorted(json.loads(line)["trial_id"] for line in found) for found in lines]
        assert ids[0] == ids[1]


def test_a_run_starts_from_another_ones_export(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    keys = (f"init={finished / 'export'}", "sft.steps=0", "train.steps=0")
    subprocess.run(command(recipe, tmp_path, *keys), check=True, capture_output=True, timeout=300)
    first, again = (load_decoder(run / "export") for run in (finished, tmp_path / "toy"))
    assert all((p == q).all() for p, q in zip(first.parameters(), again.parameters(), strict=True))
    names = {path.name for path in (finished / "export").iterdir()}
    assert {path.name for path in (tmp_path / "toy" / "export").iterdir()} == names
    assert "chat_template.jinja" in names and not (tmp_path / "toy" / "model").exists()


def test_trials_that_cannot_be_judged_end_in_one_line(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "mirror" / "nano").mkdir(parents=True)
    broken = [f"tasks.mirror={tmp_path / 'mirror'}", "sft.steps=0"]
    done = subprocess.run(
        command(recipe, tmp_path, *broken), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = done.stderr[done.stderr.index("error: ") :]
    assert "no trial could be judged" in said and "no such bare repository" in said


@pytest.mark.parametrize("killed", [False, True])
def test_sampling_ahead_is_bounded_and_trains_each_group_once(
    recipe: Path, tmp_path: Path, killed: bool
) -> None:
    run, steps = tmp_path / "toy", 5
    ahead = command(recipe, tmp_path, "train.depth=1", f"train.steps={steps}", "sft.steps=1")
    if killed:
        child = subprocess.Popen(ahead, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while child.poll() is None and not (run / "checkpoints" / "rl-00002.pt").exists():
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    subprocess.run(ahead, check=True, capture_output=True, timeout=300)
    steps_taken = [row for row in numbers(run) if row["stage"] == "rl"]
    assert len(steps_taken) == steps
    assert 0 < max(row["age_max"] for row in steps_taken) <= 2
    ids = [json.loads(x)["trial_id"] for x in (run / "trials.jsonl").read_text().splitlines()]
    trained = [name for name in ids if name.startswith("s")]
    assert len(trained) == len(set(trained)) == steps * 2 * 2
    assert {name[:6] for name in trained} == {f"s{i:05}" for i in range(steps)}


def test_ctrl_c_leaves_no_process_and_a_run_that_resumes(
    recipe: Path, finished: Path, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        command(recipe, tmp_path),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    while child.poll() is None and not (tmp_path / "toy" / "trials.jsonl").exists():
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert said.splitlines()[-1] == "interrupted: run the same command again to resume"
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    subprocess.run(command(recipe, tmp_path), check=True, capture_output=True, timeout=300)
    assert numbers(tmp_path / "toy") == numbers(finished)


def test_another_recipe_is_refused(recipe: Path, finished: Path) -> None:
    done = subprocess.run(
        command(recipe, finished.parent, "train.steps=9"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "was made by another recipe" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.stps=5", "did you mean steps?"),
        ("train.steps=many", "train.steps"),
        ("trian.steps=5", "did you mean train?"),
        ("steps", "want section.key=value"),
        ("model.top_p=0.9", "unknown key model.top_p"),
        ("tasks.path=/nowhere", "/nowhere"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    recipe: Path, tmp_path: Path, override: str, says: str
) -> None:
    done = subprocess.run(
        command(recipe, tmp_path, override), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_number_that_yaml_reads_as_text(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["train.learning_rate=1e-6"], TrainRecipe)
    assert loaded.train.learning_rate == 1e-6
    with pytest.raises(EvalkitError):
        load_recipe(recipe, ["train.learning_rate=1e-6x"], TrainRecipe)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    position = checkpoint.Position("rl", 3, {"metrics.jsonl": 5})
    checkpoint.save(tmp_path, position, {"model": {}}, "digest")
    assert checkpoint.load(tmp_path, "digest") == (position, {"model": {}})
    (tmp_path / "rl-00003.pt").write_bytes(b"torn")
    with pytest.raises(checkpoint.CheckpointError, match="rl-00003.pt: cannot be read"):
        checkpoint.load(tmp_path, "digest")


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in range(4):
        checkpoint.save(tmp_path, checkpoint.Position("rl", step), {}, "d")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["rl-00002.pt", "rl-00003.pt"]


def test_export_copies_what_transformers_loads(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    result = CliRunner().invoke(cli, ["export", str(finished), str(tmp_path / "out")])
    assert result.exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "out" / "tokenizer.json"))
    assert model.config.vocab_size >= len(tokenizer)
    again = CliRunner().invoke(cli, ["export", str(finished), str(tmp_path / "out")])
    assert again.exit_code != 0 and "exists" in again.output
