"""Where metrics go: metrics.jsonl always, Weights & Biases when asked (the extra `wandb`).

In: a run folder, a name, a flat dict of numbers per step, at the end trials and a summary. Out: one
JSON line per call; in W&B also a row per trial, histograms, and trials.jsonl as an artifact. The
same run again has the same id there and says the same. Without a key W&B works offline, into the
run folder. Refuses (EvalkitError) W&B where it is not installed.
"""

import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.trial import Trial

COLUMNS = ("trial_id", "task_id", "attempt", "try_", "stop", "outcome", "reward", "turns", "error")
BINS = 20


class Tracker(AbstractContextManager["Tracker"]):
    """Open while a run lasts; `with Tracker(...) as tracker`."""

    def __init__(
        self, folder: Path, name: str, config: Mapping[str, Any], *, wandb: bool = False
    ) -> None:
        self._folder, self._name = folder, name
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._wandb: Any = None
        if wandb:
            try:
                self._module: Any = importlib.import_module("wandb")
            except ImportError as error:
                raise EvalkitError("wandb is not installed: nanoswe-evalkit[wandb]") from error
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
            options = {"name": name, "id": name, "dir": folder, "mode": mode, "resume": "allow"}
            self._wandb = self._module.init(project="nanoswe", config=dict(config), **options)

    def log(self, metrics: Mapping[str, Any], step: int = 0) -> None:
        record = {"schema": "metrics/1", "step": step, "time_sec": time.time(), **metrics}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def finish(self, trials: Sequence[Trial], summary: Mapping[str, Any]) -> None:
        """What W&B is told of a whole evaluation."""
        if self._wandb is None:
            return
        clocks = sorted({name for trial in trials for name in trial.timings})
        rows = [[*(getattr(t, c) for c in COLUMNS), *map(t.timings.get, clocks)] for t in trials]
        tables = {"trials table": self._module.Table([*COLUMNS, *clocks], rows)}
        counted = {"turns": [float(trial.turns) for trial in trials]}
        counted |= {name: [t.timings[name] for t in trials if name in t.timings] for name in clocks}
        bins = {f"{name} histogram": self._histogram(values) for name, values in counted.items()}
        self._wandb.log(tables | bins, step=0)
        self._wandb.summary.update(dict(summary))
        artifact = self._module.Artifact(f"{self._name}-trials", "trials")
        artifact.add_file(str(self._folder / "trials.jsonl"))
        self._wandb.log_artifact(artifact)

    def _histogram(self, values: Sequence[float]) -> Any:
        """W&B makes its own only where there is numpy."""
        low, high = min(values), max(values)
        width = (high - low) / BINS or 1.0
        bins = Counter(min(int((value - low) / width), BINS - 1) for value in values)
        edges = [low + i * width for i in range(BINS + 1)]
        return self._module.Histogram(np_histogram=([bins[i] for i in range(BINS)], edges))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=1 if error else 0)


@contextmanager
def progress(console: Console, label: str, total: int) -> Iterator[Callable[[Trial], None]]:
    """A live line of the trials so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    score, so_far = Counter[str](), TextColumn("{task.fields[score]}")
    with Progress(*columns, TimeElapsedColumn(), so_far, console=console) as bar:
        job = bar.add_task(label, total=total, score="")

        def advance(trial: Trial) -> None:
            score[trial.outcome] += 1
            said = ", ".join(f"{count} {outcome}" for outcome, count in score.most_common(3))
            bar.update(job, advance=1, score=said)

        yield advance
