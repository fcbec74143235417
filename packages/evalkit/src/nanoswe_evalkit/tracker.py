"""Where metrics go: metrics.jsonl always, Weights & Biases when asked (the extra `wandb`).

In: a run folder, a name, a flat dict of numbers per step. Out: one JSON line per call. Without a
key W&B works offline, into the run folder. Refuses (EvalkitError) W&B where it is not installed.
"""

import importlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nanoswe_evalkit.outcome import EvalkitError


class Tracker(AbstractContextManager["Tracker"]):
    """Open while a run lasts; `with Tracker(...) as tracker`."""

    def __init__(
        self, folder: Path, name: str, config: Mapping[str, Any], *, wandb: bool = False
    ) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._wandb: Any = None
        if wandb:
            try:
                module = importlib.import_module("wandb")
            except ImportError as error:
                raise EvalkitError("wandb is not installed: nanoswe-evalkit[wandb]") from error
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
            options = {"name": name, "id": name, "dir": folder, "mode": mode, "resume": "allow"}
            self._wandb = module.init(project="nanoswe", config=dict(config), **options)

    def log(self, metrics: Mapping[str, Any], step: int = 0) -> None:
        record = {"schema": "metrics/1", "step": step, "time_sec": time.time(), **metrics}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=1 if error else 0)
