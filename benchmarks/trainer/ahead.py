"""What sampling ahead gains where trials wait: one recipe with `train.depth` 0 and 1, in turns.

The hidden tests of nano tasks are made to sleep, lognormally about `--sleep` seconds, as real test
suites do while the cores are idle. Prints seconds a step (median), the share of time the trainer
waits, and the greatest age; writes them to `--out`.

    python benchmarks/trainer/ahead.py --sleep 2.5 --repeats 1 --out benchmarks/trainer/ahead.json
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from result import tell

from nanoswe_harbor.convert import convert_nano

RECIPE = Path(__file__).parents[2] / "recipes" / "train" / "demo.yaml"
FIXED = (
    "sft.steps=40", "train.steps=8", "train.groups=4", "train.group_size=8", "eval.attempts=1",
    "eval.concurrency=64", "eval.share_verdicts=false", "tasks.limit=8",
)  # fmt: skip


def slow_tasks(folder: Path, sleep: float) -> None:
    """Nano tasks whose test runs take a while: the delay is the task's own, from its name."""
    convert_nano(folder, {"train": 8, "heldout": 2})
    for script in sorted(folder.glob("*/*/tests/run_eval.sh")):
        seconds = random.Random(script.parts[-3]).lognormvariate(0, 0.6) * sleep
        text = script.read_text()
        head, mark, tail = text.partition("\npython3 ")
        if not mark:
            raise SystemExit(f"{script}: no line starts the tests")
        script.write_text(f"{head}\nsleep {seconds:.2f}{mark}{tail}")


def measure(folder: Path, depth: int, number: int) -> dict[str, float]:
    name = f"depth{depth}-{number}"
    keys = (*FIXED, f"name={name}", f"tasks.path={folder}/train", f"train.depth={depth}")
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(RECIPE), *keys]
    subprocess.run([*command, "--runs", str(folder)], check=True, env=os.environ)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["stage"] == "rl"][1:]
    total = sum(row["step_sec"] for row in steps)
    return {
        "depth": depth, "step_sec": statistics.median(row["step_sec"] for row in steps),
        "waiting": sum(row["wait_sec"] for row in steps) / total,
        "age_max": max(row["age_max"] for row in steps),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sleep", type=float, default=2.5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        slow_tasks(Path(scratch), options.sleep)
        for number in range(options.repeats):
            rows += [measure(Path(scratch), depth, number) for depth in (0, 1)]
    sync, ahead = (
        statistics.median(r["step_sec"] for r in rows if r["depth"] == depth) for depth in (0, 1)
    )
    result = {"sleep_sec": options.sleep, "runs": rows, "speedup": sync / ahead}
    tell(result, options.out)


if __name__ == "__main__":
    main()
