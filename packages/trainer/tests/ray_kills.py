"""Runs a recipe on a Ray cluster once whole, and once with kill -9 on a runner, on the engine's
actor and on the run itself, each in the middle of RL; then resumed.

    RAY_ADDRESS=… python ray_kills.py RECIPE FOLDER [key=value …]

→ JSON: seconds of each, what was killed after which step, how many trials there are, and what
differs between the two: ids, rewards and tokens of all trials, each once, and the steps' numbers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TIMES = {"time_sec", "step_sec", "wait_sec", "tokens_per_sec", "trials_per_sec"}
KILLS = {1: b"ray::_run_there", 2: b"ray::Host", 3: b""}  # after so many steps; the last: the run
DEADLINE_SEC = 3000.0


def rows(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: it may be being written."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def process(title: bytes) -> int | None:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(title):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return max(found, default=None)


def disturbed(command: list[str], run: Path) -> dict[str, int]:
    """Kill as KILLS says; → what was killed, and after which step."""
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    killed: dict[str, int] = {}
    deadline = time.monotonic() + DEADLINE_SEC
    for after, title in KILLS.items():
        pid = None
        while not pid:
            assert child.poll() is None, "the run ended before all kills"
            assert time.monotonic() < deadline, f"no {title!r} to kill"
            time.sleep(0.02)
            done = [row["step"] for row in rows(run / "metrics.jsonl") if row["stage"] == "rl"]
            if done and done[-1] >= after:
                pid = process(title) if title else child.pid
        os.kill(pid, signal.SIGKILL)
        killed[title.decode() or "the run"] = done[-1]
    assert child.wait() == -9
    return killed


def facts(run: Path) -> dict[str, Any]:
    tokens = {t["trial_id"]: [s["tokens"] for s in t["samples"]]
              for t in rows(run / "trajectories.jsonl")}  # fmt: skip
    trials = rows(run / "trials.jsonl")
    assert len(trials) == len({trial["trial_id"] for trial in trials})
    return {
        "trials": sorted((t["trial_id"], t["reward"], tokens[t["trial_id"]]) for t in trials),
        "metrics": [{k: v for k, v in row.items() if k not in TIMES}
                    for row in rows(run / "metrics.jsonl")],
    }  # fmt: skip


def main() -> None:
    recipe, folder, *keys = sys.argv[1:]
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", recipe, *keys,
               "--allowlist-fallback", "name=kills", "--runs"]  # fmt: skip
    began = time.monotonic()
    subprocess.run([*command, f"{folder}/whole"], check=True, timeout=DEADLINE_SEC)
    whole_sec, began = time.monotonic() - began, time.monotonic()
    again = [*command, f"{folder}/killed"]
    killed = disturbed(again, Path(folder, "killed", "kills"))
    subprocess.run(again, check=True, timeout=DEADLINE_SEC)
    killed_sec = time.monotonic() - began
    want, got = (facts(Path(folder, side, "kills")) for side in ("whole", "killed"))
    sys.stdout.write(json.dumps({
        "whole_sec": round(whole_sec, 1), "killed_sec": round(killed_sec, 1), "killed": killed,
        "trials": len(want["trials"]), "keys": keys,
        "differ": [key for key in want if want[key] != got[key]],
        "avg_at_k": [row["avg_at_k"] for row in want["metrics"] if row["stage"] == "eval"],
    }) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
