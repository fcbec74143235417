"""What the phases of check.py share: the machine, the sizes, one update and its work.

In: whether this is the rehearsal at toy size, and the file of results. Out: models and documents of
random content, timings that wait for the device, a JSON line for each phase.
"""

import json
import math
import random
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nanoswe_trainer.algo import policy_loss
from nanoswe_trainer.lora import add_lora
from nanoswe_trainer.model import Decoder, ModelConfig, initialise
from nanoswe_trainer.pack import Row
from nanoswe_trainer.recipe import TrainSection
from nanoswe_trainer.worker import Worker

QWEN3_06B = ModelConfig(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, rope_theta=1e6,
)  # fmt: skip
QWEN3_4B = replace(
    QWEN3_06B, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32,
)  # fmt: skip
TOY = ModelConfig(vocab_size=512)
LOSS = partial(policy_loss, train=TrainSection(preset="dapo"))


class Bench:
    """The machine, the sizes, and the lines written so far."""

    def __init__(self, toy: bool, out: Path | None):
        self.toy, self.out, self.missed = toy, out, 0
        torch.set_num_threads(1 if toy else 8)
        self.device = torch.device("cpu" if toy else "cuda")
        self.small = TOY if toy else QWEN3_06B
        self.scale = 64 if toy else 1  # documents are so many times shorter
        self.bf16 = not toy

    def made(self, config: ModelConfig, seed: int = 0) -> Decoder:
        """Random weights whose distributions are neither flat nor sharp."""
        decoder = initialise(replace(config), seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.ndim == 2:
                    std = parameter.shape[1] ** -0.5
                    parameter.normal_(std=std, generator=generator)
        return decoder.to(self.device)

    def sync(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def rows(self, lengths: list[int], config: ModelConfig, seed: int = 0) -> list[Row]:
        """Documents of which the latter half is sampled."""
        rng, out = random.Random(seed), []
        total = sum(n - n // 2 for n in lengths)
        for n in lengths:
            half = n // 2
            weights = (0.0,) * half + (1.0 / total,) * (n - half)
            tokens = tuple(rng.randrange(config.vocab_size) for _ in range(n))
            sign = rng.choice((-1.0, 1.0))
            out.append(Row(tokens, weights, (sign,) * n, (-math.log(config.vocab_size),) * n))
        return out

    def say(self, phase: int, began: float, bars: dict[str, bool], **facts: object) -> None:
        self.missed += sum(not met for met in bars.values())
        took = round(self.sync() - began, 2)
        line = json.dumps({"phase": phase, "sec": took, **facts, "bars": bars})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if self.out:
            with self.out.open("a") as file:
                file.write(line + "\n")


def flops(config: ModelConfig, lengths: list[int], trained: int) -> tuple[float, float]:
    """(strict, as prime-rl counts) of one forward and backward; recomputation is not work done."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    kv = 2 * config.num_key_value_heads * config.head_dim
    width = heads * config.head_dim
    block = config.hidden_size * (2 * width + kv + 3 * config.intermediate_size)
    head, tokens = config.vocab_size * config.hidden_size, sum(lengths)
    strict = 6 * (layers * block * tokens + head * trained)
    strict += 12 * layers * width * sum(n * n / 2 for n in lengths)
    peer = 6 * (layers * block + head) * tokens
    peer += 12 * layers * config.hidden_size * sum(n * n for n in lengths)
    return strict, peer


def update(bench: Bench, config: ModelConfig, lengths: list[int], *, recompute: bool = True,
           steps: int = 3, lora: int = 0) -> dict[str, float]:  # fmt: skip
    """Full RL updates on documents of these lengths: the median's speed and its peak memory."""
    decoder = bench.made(config)
    if lora:
        add_lora(decoder.cpu(), lora, 0)
        decoder.to(bench.device)
    decoder.recompute = recompute
    worker = Worker(decoder, max_tokens=max(lengths), bf16=bench.bf16)
    worker.begin(learning_rate=1e-6)
    rows = bench.rows(lengths, config)
    trained = sum(n - n // 2 for n in lengths)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps + 1):
        start = bench.sync()
        worker.step(rows, LOSS)
        times.append(bench.sync() - start)
    took = statistics.median(times[1:])
    strict, peer = flops(config, lengths, trained)
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.device.type == "cuda" else 0.0
    return {
        "sec": round(took, 3), "tokens_per_sec": round(sum(lengths) / took),
        "mfu_strict": round(strict / took / bench.ceiling, 3),
        "mfu_peer": round(peer / took / bench.ceiling, 3), "peak_gib": round(peak, 1),
    }  # fmt: skip
