"""B12: seconds of wall time from the start of a program to the end of its first update (32 short
demonstrations, the demo's model): `nanoswe-trainer run` in one process; the same with two ranks as
actors of a Ray cluster, which is started within the time; and a script of TRL's SFTTrainer.

    python benchmarks/trainer/b12_start.py --trl .nox/parity/bin/python --out …/b12.json
        (needs ray; the Python of --trl needs trl==1.16.0)
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result import tell

from nanoswe_harbor.convert import convert_nano
from nanoswe_trainer import tiny
from nanoswe_trainer.cluster import free_address

RECIPE = """
name: NAME
tasks: {path: FOLDER/train, limit: 2}
sft: {steps: 1, batch: 32, muon_learning_rate: 0}
train: {steps: 1, groups: 1, group_size: 2}
cluster: {train_threads: 1}
"""
TRL = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer
folder, out = sys.argv[1:]
class Done(TrainerCallback):
    def on_step_end(self, *_, **__):
        open(out, "w").write("done\\n")
tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json",
                                    pad_token="<|endoftext|>", eos_token="<|im_end|>")
rows = [{"input_ids": list(range(3, 150))}] * 32
config = SFTConfig(output_dir=folder + "/trl", per_device_train_batch_size=32, max_steps=1,
                   use_cpu=True, bf16=False, report_to="none", save_strategy="no")
SFTTrainer(model=AutoModelForCausalLM.from_pretrained(folder), args=config, callbacks=[Done()],
           train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
"""


def until(told: Path, began: float, running: subprocess.Popen) -> float:
    """Seconds until the file has a line; the program is ended then."""
    while not (told.exists() and told.read_text().endswith("\n")):
        if running.poll() is not None:
            raise SystemExit(f"it ended before its first update: {running.args}")
        time.sleep(0.02)
    took = time.perf_counter() - began
    running.terminate()
    running.wait(60)
    return took


def start(*command: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    return subprocess.Popen(command, env=env, start_new_session=True, **quiet)


def ours(folder: Path, name: str, *keys: str, env: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(folder)).replace("NAME", name))
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(recipe), *keys]
    running = start(*command, "--runs", str(folder), "--allowlist-fallback", env=env)
    return until(folder / name / "metrics.jsonl", began, running)


def on_ray(folder: Path, name: str) -> float:
    began, address = time.perf_counter(), free_address()
    # said aloud, or a token that some program has left makes the health check fail
    env = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    ray = str(Path(sys.executable).with_name("ray"))
    head = start(
        ray, "start", "--head", "--block", "--port", address.rpartition(":")[2], "--num-cpus", "4",
        "--include-dashboard", "false", "--object-store-memory", "100000000", env=env,
    )  # fmt: skip
    try:
        while start(ray, "health-check", "--address", address, env=env).wait():
            time.sleep(0.2)
        up = time.perf_counter() - began
        keys = "cluster.backend=ray", "cluster.ranks=2"
        return up + ours(folder, name, *keys, env=env)
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl", default=sys.executable)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"in_process": [], "ray": [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_nano(folder, {"train": 2, "heldout": 1})
        tiny.create(folder / "tiny", 0)
        for number in range(options.repeats):
            found["in_process"].append(ours(folder, f"here{number}"))
            found["ray"].append(on_ray(folder, f"ray{number}"))
            done, began = folder / f"trl{number}", time.perf_counter()
            script = start(options.trl, "-c", TRL, str(folder / "tiny"), str(done))
            found["trl"].append(until(done, began, script))
    middle = {way: round(statistics.median(times), 2) for way, times in found.items()}
    tell({"sec": middle, "all": found}, options.out)


if __name__ == "__main__":
    main()
