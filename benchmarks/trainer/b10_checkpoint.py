"""B10: saving a checkpoint against a raw write of as many bytes; and, in a process of its own, from
what is imported to the first step after a resume: ours, and Hugging Face's Trainer. The same model
of 4.4 M parameters with AdamW's state, one row of 64 tokens a step, one thread.

    python benchmarks/trainer/b10_checkpoint.py --out benchmarks/trainer/b10.json
        (needs transformers and accelerate)
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from b1_update import CONFIG
from result import tell
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from nanoswe_trainer import checkpoint
from nanoswe_trainer.model import initialise, load_decoder, save_decoder
from nanoswe_trainer.pack import Row
from nanoswe_trainer.worker import Worker, nll

IDS = tuple(range(3, 67))
ROW = Row(IDS, (0.0, *[1 / 63] * 63))


def raw_write(path: Path, data: bytes) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def opened(folder: Path) -> Worker:
    worker = Worker(load_decoder(folder))
    worker.begin(learning_rate=1e-6)
    return worker


def save_ours(folder: Path, number: int, worker: Worker) -> float:
    began = time.perf_counter()
    worker.save(folder / "ours", checkpoint.Position("rl", number), "digest", {})
    return time.perf_counter() - began


def resume_ours(folder: Path) -> float:
    began = time.perf_counter()
    worker = opened(folder)
    worker.load(folder / "ours", "digest", optimizers=True)
    worker.step([ROW], nll)
    return time.perf_counter() - began


def trainer(folder: Path, steps: int, marks: dict[str, float]) -> Trainer:
    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks["step"] = time.perf_counter()

        def on_save(self, *_: Any, **__: Any) -> None:
            marks["saved"] = time.perf_counter()

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=1, max_steps=steps,
        save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-6,
        logging_steps=1000,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    data = [{"input_ids": list(IDS), "labels": list(IDS)}] * 4
    return Trainer(model, arguments, train_dataset=data, callbacks=[Clock()])


def save_theirs(folder: Path) -> float:
    marks: dict[str, float] = {}
    trainer(folder, 1, marks).train()
    return marks["saved"] - marks["step"]


def resume_theirs(folder: Path) -> float:
    began, marks = time.perf_counter(), {"step": 0.0}
    trainer(folder, 2, marks).train(resume_from_checkpoint=str(folder / "trainer/checkpoint-1"))
    return marks["step"] - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--resume", choices=["ours", "theirs"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.resume:
        act = resume_ours if options.resume == "ours" else resume_theirs
        sys.stdout.write(f"\n{act(options.folder)}")
        return
    names = ("save", "raw", "trainer_save", "resume", "trainer_resume")
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # a disk, where /tmp may be memory
        folder = Path(name)
        save_decoder(initialise(CONFIG, 0), folder)
        worker = opened(folder)
        worker.step([ROW], nll)
        for number in range(options.repeats):
            found["save"].append(save_ours(folder, number, worker))
            whole = (folder / f"ours/rl-{number:05}.pt").read_bytes()
            found["raw"].append(raw_write(folder / "raw", whole))
            found["trainer_save"].append(save_theirs(folder))
            for side, key in (("ours", "resume"), ("theirs", "trainer_resume")):
                command = [sys.executable, __file__, "--resume", side, "--folder", name]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[key].append(float(done.stdout.splitlines()[-1]))
    middle = {key: round(statistics.median(times), 3) for key, times in found.items()}
    over = [save / raw for save, raw in zip(found["save"], found["raw"], strict=True)]
    tell({"bytes": len(whole), "sec": middle, "over_raw": round(statistics.median(over), 2),
          "torch": torch.__version__, "all": found}, options.out)  # fmt: skip


if __name__ == "__main__":
    main()
