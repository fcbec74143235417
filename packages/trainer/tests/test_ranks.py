"""Several ranks over gloo: the numbers of one, whatever a rank has to do; failures by name."""

import os
import random
import signal
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from nanoswe_trainer import checkpoint
from nanoswe_trainer.algo import policy_loss
from nanoswe_trainer.cluster import RankError, open_ranks
from nanoswe_trainer.model import Decoder, load_decoder, save_decoder
from nanoswe_trainer.pack import Row, spread
from nanoswe_trainer.recipe import TrainRecipe, TrainSection
from nanoswe_trainer.worker import Worker, nll, open_worker

LOSS = partial(policy_loss, train=TrainSection(policy="clip", kl=0.1))


def recipe(ranks: int, **cluster: object) -> TrainRecipe:
    sizes = {"ranks": ranks, "train_threads": 1, "max_tokens": 256, **cluster}
    return TrainRecipe(name="r", tasks={"path": "."}, cluster=sizes)


def rows(count: int, seed: int = 0) -> list[Row]:
    """Of very unequal lengths."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        n = rng.choice((4, 9, 30, 120))
        weights = (0.0, *(0.3 / n if rng.random() < 0.7 else 0.0 for _ in range(n - 1)))
        advantages = (rng.choice((-1.0, 1.0)),) * n
        out.append(Row(tuple(rng.randrange(50) for _ in range(n)), weights, advantages,
                       tuple(-6.0 + rng.random() for _ in range(n))))  # fmt: skip
    return out


def course(worker: Worker, reference: Path, steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Steps on 7, 1 (a rank has nothing to do) and 5 rows."""
    found = []
    for step in range(steps):
        batch = rows((7, 1, 5)[step % 3], seed + step)
        found.append(worker.step(batch, LOSS, rate=1.0, temperature=0.9))
    return found


def close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.pop("grad_norm") == pytest.approx(other["grad_norm"], rel=1e-5)
        rest = {k: v for k, v in other.items() if k != "grad_norm"}
        assert one == pytest.approx(rest, rel=1e-6, abs=1e-6)


def test_two_ranks_give_the_numbers_of_one_and_checkpoints_fit_both(
    small: Decoder, tmp_path: Path
) -> None:
    model_dir = tmp_path / "model"
    save_decoder(small, model_dir)
    settings = {"learning_rate": 1e-5, "reference": model_dir}
    at = checkpoint.Position("rl", 3)
    alone = open_worker(recipe(1), model_dir)
    alone.begin(**settings)
    first = course(alone, model_dir, 3)
    alone.save(tmp_path / "one", at, "d", {})
    rest = course(alone, model_dir, 3, seed=9)
    held = alone.measure(rows(3), nll)
    with open_ranks(recipe(2, recompute=True), model_dir) as ranks:
        ranks.begin(**settings)
        close(course(ranks, model_dir, 3), first)
        ranks.save(tmp_path / "two", at, "d", {"ledger": 5})
        close(course(ranks, model_dir, 3, seed=9), rest)
        assert ranks.measure(rows(3), nll)["loss"] == pytest.approx(held["loss"], rel=1e-6)
        assert ranks.logprobs(rows(1)[0]) == pytest.approx(alone.logprobs(rows(1)[0]), abs=1e-5)
        ranks.export(tmp_path / "export")
        ranks.begin(**settings)  # from the checkpoint of one rank
        ranks.load(tmp_path / "one", "d", optimizers=True)
        close(course(ranks, model_dir, 3, seed=9), rest)
        with pytest.raises(RankError, match=r"`begin` failed on rank 0: .*muon_learning_rate=0"):
            ranks.begin(learning_rate=1e-3, muon_learning_rate=0.02)
        os.kill(max(p.pid for p in active_children()), signal.SIGKILL)
        with pytest.raises(RankError, match=r"`step` failed on .*rank 1: BrokenProcessPool"):
            ranks.step(rows(2), LOSS)
    alone.begin(**settings)  # from the checkpoint of two
    alone.load(tmp_path / "two", "d", optimizers=True)
    close(course(alone, model_dir, 3, seed=9), rest)
    exported, trained = load_decoder(tmp_path / "export"), alone.decoder
    for ours, theirs in zip(exported.parameters(), trained.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_rows_are_spread_evenly_whole_and_in_order() -> None:
    found = rows(40, seed=3)
    shares = spread(found, 4)
    assert sorted(map(found.index, (r for share in shares for r in share))) == list(range(40))
    assert all([*map(found.index, share)] == sorted(map(found.index, share)) for share in shares)
    tokens = [sum(len(row.tokens) for row in share) for share in shares]
    assert max(tokens) - min(tokens) <= 120
