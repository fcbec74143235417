"""B1, B2: CPU seconds a trained token of one GRPO update, ours and TRL's, and our share of the GEMM
rate. The same random weights, ids, lengths and advantages; fp32, one thread; process CPU time.

Each side runs in a process of its own, in turns; medians over steps and turns.

    python benchmarks/trainer/b1_update.py --out benchmarks/trainer/b1.json    (needs trl==1.16.0)
    python benchmarks/trainer/b1_update.py --alone --out benchmarks/trainer/b2.json    (ours only)

B3 (`b3_skew.py`) asks for it at several skews.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from result import tell

from nanoswe_trainer import tiny
from nanoswe_trainer.algo import group_advantages, policy_loss
from nanoswe_trainer.model import ModelConfig, initialise, load_decoder, save_decoder
from nanoswe_trainer.pack import Row
from nanoswe_trainer.recipe import TrainSection
from nanoswe_trainer.worker import Worker

CONFIG = ModelConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=5,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)  # fmt: skip
ROWS, GROUP = 32, 8
MICRO = 1024  # tokens of our micro-batches: a core's cache holds the activations of a block


def sequences(skew: float) -> list[tuple[list[int], list[int], float]]:
    """(prompt, completion, reward), 230 tokens on average: lognormal lengths, or, with a skew, on
    a curve whose longest is so many times the average.
    """
    rng, out = random.Random(1), []
    for i in range(ROWS):
        n = int(min(1024, max(12, 230 * rng.lognormvariate(-0.5, 1.0))))
        if skew:
            n = max(12, round(230 * skew * ((i * 13 % ROWS + 1) / ROWS) ** (skew - 1)))
        ids = [rng.randrange(3, CONFIG.vocab_size) for _ in range(n)]
        out.append((ids[: n // 3], ids[n // 3 :], float((i * 7) % 3 == 0)))
    return out


def gemm_rate() -> float:
    """FLOP a CPU second of the products that a step of this model is made of, forward and backward,
    at a micro-batch of rows and weighted by their work.
    """
    c = CONFIG
    width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    d, inner = c.hidden_size, c.intermediate_size
    block = [(d, width), (d, kv), (d, kv), (width, d), (d, inner), (d, inner), (inner, d)]
    shapes = [(c.num_hidden_layers, *shape) for shape in block] + [(2 / 3, d, c.vocab_size)]
    done, spent = 0.0, 0.0
    for times, k, n in shapes:  # two thirds of the tokens are trained: the head sees no others
        x, w, g = torch.randn(MICRO, k), torch.randn(n, k), torch.randn(MICRO, n)
        for left, right in ((x, w.T), (g, w), (g.T, x)):
            spans = []
            for _ in range(5):
                start = time.process_time()
                left @ right
                spans.append(time.process_time() - start)
            done, spent = done + 2 * MICRO * k * n * times, spent + statistics.median(spans) * times
    return done / spent


def flops(lengths: list[int], trained: int) -> float:
    c = CONFIG
    width = c.num_attention_heads * c.head_dim
    kv = 2 * c.num_key_value_heads * c.head_dim
    block = c.hidden_size * (2 * width + kv + 3 * c.intermediate_size)
    matrices = 6 * (
        c.num_hidden_layers * block * sum(lengths) + c.vocab_size * c.hidden_size * trained
    )
    return matrices + 12 * c.num_hidden_layers * width * sum(n * n / 2 for n in lengths)


def ours(folder: Path, steps: int, skew: float) -> tuple[list[float], list[float]]:
    """CPU seconds of each step, and the GEMM rate measured right after it."""
    drawn = sequences(skew)
    total = sum(len(c) for _, c, _ in drawn)
    rows = []
    for first in range(0, ROWS, GROUP):
        group = drawn[first : first + GROUP]
        values = group_advantages([r for *_, r in group], kind="mean_std").values
        for (prompt, completion, _), value in zip(group, values, strict=True):
            n, m = len(prompt), len(completion)
            rows.append(Row((*prompt, *completion), (0.0,) * n + (1 / total,) * m,
                            (value or 0.0,) * (n + m), (-7.6,) * (n + m)))  # fmt: skip
    worker = Worker(load_decoder(folder), max_tokens=MICRO)
    worker.begin(learning_rate=1e-6)
    loss = partial(policy_loss, train=TrainSection(preset="dapo"))
    times, rates = [], []
    for _ in range(steps):
        start = time.process_time()
        worker.step(sorted(rows, key=lambda row: len(row.tokens)), loss)
        times.append(time.process_time() - start)
        rates.append(gemm_rate())
    return times[1:], rates[1:]


def trl(folder: Path, steps: int, skew: float, micro: int) -> tuple[list[float], list[float]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    drawn, times = sequences(skew), []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.began = time.process_time()

        def on_step_end(self, *_: object, **__: object) -> None:
            times.append(time.process_time() - self.began)

    def rollout(prompts: list, _trainer: object) -> dict:
        assert len(prompts) == ROWS
        return {"prompt_ids": [p for p, _, _ in drawn], "completion_ids": [c for _, c, _ in drawn],
                "logprobs": [[-7.6] * len(c) for _, c, _ in drawn]}  # fmt: skip

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [r for *_, r in drawn],
        args=GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=micro, use_cpu=True,
            gradient_accumulation_steps=ROWS // micro, num_generations=GROUP, max_steps=steps,
            max_completion_length=2048, beta=0.0, loss_type="dapo", epsilon_high=0.28, bf16=False,
            report_to="none", save_strategy="no", logging_steps=1000, learning_rate=1e-6,
            gradient_checkpointing=False, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * ROWS}), processing_class=tokenizer,
        rollout_func=rollout, callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return times[1:], []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="the first warms up")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--skew", type=float, default=0.0, help="the longest over the average")
    parser.add_argument("--sides", nargs="+", default=["ours", "trl4", "trl8"])
    parser.add_argument("--alone", dest="sides", action="store_const", const=["ours"],
                        help="without the peer")  # fmt: skip
    parser.add_argument("--side", choices=["ours", "trl4", "trl8"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.side:
        act = ours if options.side == "ours" else partial(trl, micro=int(options.side[3:]))
        sys.stdout.write("\n" + json.dumps(act(options.folder, options.steps, options.skew)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.create(folder, 0)
        decoder = initialise(CONFIG, 0)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=0.02)
        save_decoder(decoder, folder)
        found: dict[str, list[float]] = {side: [] for side in options.sides}
        rates: list[float] = []
        for _ in range(options.turns):
            for side, times in found.items():
                command = [sys.executable, __file__, "--side", side, "--folder", name, "--steps",
                           str(options.steps), "--skew", str(options.skew)]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                more, more_rates = json.loads(done.stdout.splitlines()[-1])
                times += more
                rates += more_rates
    drawn = sequences(options.skew)
    lengths, trained = [len(p) + len(c) for p, c, _ in drawn], sum(len(c) for _, c, _ in drawn)
    middle = {side: statistics.median(times) for side, times in found.items()}
    work = flops(lengths, trained)
    shares = [work / t / rate for t, rate in zip(found["ours"], rates, strict=True)]
    result = {
        "cpu_sec": middle, "tokens": sum(lengths), "trained": trained, "longest": max(lengths),
        "trained_tokens_per_cpu_sec": {s: round(trained / t) for s, t in middle.items()},
        "ratio": round(min(list(middle.values())[1:], default=0.0) / middle["ours"], 2),
        "gflops": round(work / middle["ours"] / 1e9, 1),
        "gemm_gflops": round(statistics.median(rates) / 1e9, 1),
        "share_of_gemm": round(statistics.median(shares), 3), "torch": torch.__version__,
        "all": found | {"shares": [round(share, 3) for share in shares]},
    }  # fmt: skip
    tell(result, options.out)


if __name__ == "__main__":
    main()
