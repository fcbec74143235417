"""LoRA: nothing changes before the first step, only the additions learn, the export is merged."""

from pathlib import Path

import torch

from nanoswe_trainer import checkpoint
from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.model import load_decoder
from nanoswe_trainer.pack import Row, pack
from nanoswe_trainer.recipe import TrainRecipe
from nanoswe_trainer.worker import Worker, nll, open_worker

ROWS = [Row((1, 5, 7, 9), (0.0, 0.2, 0.1, 0.3)), Row((4, 2, 8), (0.0, 0.1, 0.3))]


def worker(folder: Path, rank: int) -> Worker:
    cluster = {"lora": rank, "train_threads": 1}
    made = open_worker(TrainRecipe(name="r", tasks={"path": "."}, cluster=cluster), folder)
    made.begin(learning_rate=1e-2)
    return made


def logprobs(decoder: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(decoder, pack(ROWS))[0]


def test_only_the_additions_learn_and_the_export_is_merged(model_dir: Path, tmp_path: Path) -> None:
    base, tuned = load_decoder(model_dir), worker(model_dir, 4)
    assert torch.equal(logprobs(base), logprobs(tuned.decoder))
    before = {n: p.clone() for n, p in tuned.decoder.named_parameters()}
    losses = [tuned.step(ROWS, nll)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    moved = {n for n, p in tuned.decoder.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(n.endswith((".lora_a", ".lora_b")) for n in moved)
    assert len(moved) == 4 * 7 * 2  # layers, matrices, A and B
    tuned.export(tmp_path / "out")
    assert torch.allclose(
        logprobs(load_decoder(tmp_path / "out")), logprobs(tuned.decoder), atol=1e-5
    )
    again = worker(model_dir, 4)
    tuned.save(tmp_path / "c", checkpoint.Position("rl", 4), "d", {})
    again.load(tmp_path / "c", "d", optimizers=True)
    assert tuned.step(ROWS, nll) == again.step(ROWS, nll)
    whole = worker(model_dir, 0)
    whole.save(tmp_path / "w", checkpoint.Position("rl", 4), "d", {}, optimizers=False)
    sizes = [next((tmp_path / n).glob("*.pt")).stat().st_size for n in "cw"]
    assert sizes[0] < sizes[1] / 2


def test_with_muon_nothing_is_left_for_adamw(model_dir: Path) -> None:
    tuned = worker(model_dir, 4)
    tuned.begin(learning_rate=1e-2, muon_learning_rate=1e-2)
    losses = [tuned.step(ROWS, nll)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0] and len(tuned.optimizers) == 1
