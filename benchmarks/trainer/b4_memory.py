"""B4: peak memory of one update over vocabularies of 2k to 150k, 8,192 tokens all trained: our head
in chunks, and a plain one that holds all logits. A process for each; a small body, so that the head
is what is seen.

    python benchmarks/trainer/b4_memory.py --out benchmarks/trainer/b4.json
"""

import argparse
import json
import random
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nanoswe_trainer import worker as worker_module
from nanoswe_trainer.algo import policy_loss
from nanoswe_trainer.model import Decoder, ModelConfig, packed_attention
from nanoswe_trainer.pack import Batch, Row
from nanoswe_trainer.recipe import TrainSection

TOKENS, ROWS = 8192, 8


def plain(decoder: Decoder, batch: Batch, **_: object) -> tuple[Tensor, Tensor]:
    hidden = decoder(batch.ids_T, batch.positions_T, packed_attention(batch.lengths))
    logprobs = torch.log_softmax(decoder.head(hidden[batch.predictors_N]).float(), -1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, batch.targets_N[:, None])[:, 0], entropy


def one(vocabulary: int, head: str) -> float:
    """Peak GiB of this process."""
    torch.set_num_threads(2)
    if head == "plain":
        worker_module.token_logprobs = plain
    config = ModelConfig(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=2)
    worker = worker_module.Worker(Decoder(config), max_tokens=TOKENS)
    worker.begin(learning_rate=1e-6)
    rng, n = random.Random(0), TOKENS // ROWS
    rows = [Row(tuple(rng.randrange(vocabulary) for _ in range(n)), (0.0, *[1 / TOKENS] * (n - 1)),
                (1.0,) * n, (-8.0,) * n) for _ in range(ROWS)]  # fmt: skip
    worker.step(rows, partial(policy_loss, train=TrainSection()))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(f"{one(int(options.one[0]), options.one[1]):.3f}")
        return
    found = []
    for vocabulary in (2048, 16384, 65536, 151936):
        for head in ("chunks", "plain"):
            if head == "plain" and vocabulary > 65536:
                continue  # 8,192 x 151,936 logits, several times over: more than this machine has
            command = [sys.executable, __file__, "--one", str(vocabulary), head]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append({"vocabulary": vocabulary, "head": head, "peak_gib": float(done.stdout)})
            sys.stdout.write(json.dumps(found[-1]) + "\n")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
