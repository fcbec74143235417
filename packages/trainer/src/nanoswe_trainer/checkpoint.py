"""Checkpoints: everything that a bit-exact resume needs, in; one file that is either whole or
absent, out.

A file is written under a temporary name, synced and renamed; the newest two are kept. It also holds
the sizes of the run's record files, so that records of a step that never finished are cut off when
the run resumes. Refuses a checkpoint of another recipe.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

KEPT = 2


class CheckpointError(RuntimeError):
    """The run folder cannot be resumed; the message says why and what to do."""


@dataclass(frozen=True)
class Position:
    """How far a run has come. Stages are in the order of `loop.STAGES`."""

    stage: str
    step: int
    sizes: dict[str, int] = field(default_factory=dict)  # record file -> bytes


def save(folder: Path, position: Position, state: dict[str, Any], recipe_digest: str) -> None:
    """Write checkpoints/<stage>-<step>.pt and forget the older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{position.stage}-{position.step:05}.pt"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        record = {"stage": position.stage, "step": position.step, "sizes": position.sizes,
                  "recipe": recipe_digest, "state": state}  # fmt: skip
        torch.save(record, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    (folder / "latest.tmp").write_text(path.name)
    (folder / "latest.tmp").replace(folder / "latest")
    for old in sorted(folder.glob("*.pt"), key=lambda p: p.stat().st_mtime_ns)[:-KEPT]:
        old.unlink()


def load(folder: Path, recipe_digest: str) -> tuple[Position, dict[str, Any]] | None:
    """The newest checkpoint, or None where there is none."""
    pointer = folder / "latest"
    if not pointer.exists():
        return None
    path = folder / pointer.read_text().strip()
    try:
        record = torch.load(path, weights_only=True, mmap=True)
    except Exception as error:  # a damaged file fails in whatever way its bytes suggest
        again = f"delete {folder} to start again"
        raise CheckpointError(f"{path}: cannot be read ({error}); {again}") from error
    if record["recipe"] != recipe_digest:
        other = "was made by another recipe or from other data; choose another name=…, or delete it"
        raise CheckpointError(f"{folder.parent}: {other}")
    return Position(record["stage"], record["step"], record["sizes"]), record["state"]


def truncate(run_dir: Path, sizes: dict[str, int]) -> None:
    """Cut record files back to what they held at the checkpoint."""
    for name, size in sizes.items():
        path = run_dir / name
        if path.exists() and path.stat().st_size > size:
            with path.open("r+b") as file:
                file.truncate(size)
