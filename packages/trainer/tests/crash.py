"""Runs a small recipe once whole and once for every named crash point: killed there, then resumed.

    python crash.py RECIPE FOLDER  → JSON: of each point its signal, and what differs from the whole

A child is forked for each run, so that torch is imported once. The kill is SIGKILL: nothing is
flushed, closed or said.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoswe_evalkit.recipe import load_recipe
from nanoswe_evalkit.tracker import Tracker
from nanoswe_trainer import checkpoint, loop, loop_rl, model
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.view import View
from nanoswe_trainer.worker import Worker

TIMES = {"time_sec", "step_sec", "wait_sec", "tokens_per_sec", "trials_per_sec"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at(owner: Any, name: str, call: int, *, after: bool = False) -> None:
    """Die in the `call`th call of owner.name, before it does anything or when it has."""
    whole: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 10**6))

    def watched(*args: Any, **kwargs: Any) -> Any:
        here = next(calls) == call
        if here and not after:
            die()
        done = whole(*args, **kwargs)
        if here:
            die()
        return done

    setattr(owner, name, watched)


def torn(owner: Any, name: str, call: int) -> None:
    """Die when the file that the `call`th call writes holds half of it."""
    whole: Callable[..., Any] = getattr(owner, name)
    calls = iter(range(1, 10**6))

    def watched(folder: Path, *args: Any, **kwargs: Any) -> Any:
        before = {p: p.stat().st_size for p in folder.glob("tr*.jsonl")}
        done = whole(folder, *args, **kwargs)
        if next(calls) == call:
            for path, size in before.items():
                os.truncate(path, (size + path.stat().st_size) // 2)
            die()
        return done

    setattr(owner, name, watched)


POINTS: dict[str, Callable[[], None]] = {
    "sampled, not trained": lambda: at(loop_rl, "rl_rows", 2),
    "trained, not recorded": lambda: at(loop, "append_records", 2),
    "records half written": lambda: torn(loop, "append_records", 2),
    "recorded, not measured": lambda: at(loop, "append_records", 3, after=True),
    "measured, not saved": lambda: at(Tracker, "log", 4, after=True),
    "checkpoint not begun": lambda: at(Worker, "save", 4),
    "checkpoint not synced": lambda: at(checkpoint.os, "fsync", 4),
    "checkpoint whole, not named": lambda: at(checkpoint.os, "fsync", 4, after=True),
    "checkpoint named, not pointed to": lambda: at(checkpoint.Path, "write_text", 6),
    "pointed to, old ones there": lambda: at(checkpoint.Path, "unlink", 2),
    "saved": lambda: at(Worker, "save", 5, after=True),
    "export not written": lambda: at(model, "save_file", 2),
}


def run(recipe: TrainRecipe, folder: Path, point: Callable[[], None] | None = None) -> int:
    """The exit status of a child that runs it."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    try:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        folder.mkdir(parents=True, exist_ok=True)
        if point:
            point()
        asyncio.run(loop.train(recipe, folder, "allowlist", View()))
        os._exit(0)
    except BaseException as error:
        sys.stdout.write(f"{error!r}\n")
        sys.stdout.flush()
        os._exit(2)


def facts(folder: Path) -> dict[str, Any]:
    """All that two runs must agree in: R1, and, being synchronous, R2."""
    lines = {n: (folder / f"{n}.jsonl").read_text().splitlines()
             for n in ("metrics", "trials", "trajectories")}  # fmt: skip
    metrics = [{k: v for k, v in json.loads(line).items() if k not in TIMES}
               for line in lines["metrics"]]  # fmt: skip
    trials = sorted((t["trial_id"], t["reward"]) for t in map(json.loads, lines["trials"]))
    tokens = sorted((t["trial_id"], [s["tokens"] for s in t["samples"]])
                    for t in map(json.loads, lines["trajectories"]))  # fmt: skip
    weights = model.load_decoder(folder / "export").state_dict()
    sums = {k: v.double().abs().sum().item() for k, v in weights.items()}
    return {"metrics": metrics, "trials": trials, "tokens": tokens, "weights": sums}


def main() -> None:
    recipe = load_recipe(Path(sys.argv[1]), [], TrainRecipe)
    folder = Path(sys.argv[2])
    assert run(recipe, folder / "whole") == 0
    want, found = facts(folder / "whole"), {}
    for number, (name, point) in enumerate(POINTS.items()):
        here = folder / str(number)
        status = run(recipe, here, point)
        resumed = run(recipe, here)
        got = facts(here) if not resumed else {}
        differ = [key for key in want if got.get(key) != want[key]]
        found[name] = {"signal": os.WTERMSIG(status), "resumed": resumed, "differ": differ}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
