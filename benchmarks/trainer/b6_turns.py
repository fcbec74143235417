"""B6: ragged conversations, four prompts of eight attempts and six turns: CPU seconds a sampled
token of the embedded engine, and of transformers.generate called turn by turn on the padded batch,
as a loop without an engine does. The same random weights, prompts and lengths; fp32, one thread.

    python benchmarks/trainer/b6_turns.py --out benchmarks/trainer/b6.json
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from result import tell
from transformers import AutoModelForCausalLM

from nanoswe_proxy.engine.base import Sampling
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.model import Decoder, ModelConfig, initialise, save_decoder

CONFIG = ModelConfig(vocab_size=1024)
GROUPS, SIZE, TURNS, PROMPT, SEEN = 4, 8, 6, 100, 20


def plan() -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, tokens to sample in each turn of each conversation)"""
    rng = random.Random(2)
    prompts = [[rng.randrange(1000) for _ in range(PROMPT)] for _ in range(GROUPS)]
    lengths = [[int(min(64, 4 + rng.lognormvariate(2.5, 0.8))) for _ in range(TURNS)]
               for _ in range(GROUPS * SIZE)]  # fmt: skip
    return prompts, lengths


def seen(i: int, turn: int) -> list[int]:
    """What the environment answers."""
    rng = random.Random(f"{i}/{turn}")
    return [rng.randrange(1000) for _ in range(SEEN)]


def ours(decoder: Decoder) -> float:
    prompts, lengths = plan()

    async def one(engine: LocalEngine, i: int) -> None:
        ids = list(prompts[i // SIZE])
        for turn, n in enumerate(lengths[i]):
            sampling = Sampling(1.0, n, (), f"{i}")
            ids += [s.token async for s in engine.generate(f"{i}", ids, sampling)]
            ids += seen(i, turn)
        await engine.release(f"{i}")

    async def all_of_them() -> None:
        with ThreadPoolExecutor(1) as compute:
            engine = LocalEngine(decoder, slots=GROUPS * SIZE, max_context=640, compute=compute)
            await asyncio.gather(*(one(engine, i) for i in range(GROUPS * SIZE)))

    start = time.process_time()
    asyncio.run(all_of_them())
    return time.process_time() - start


def theirs(model: torch.nn.Module) -> float:
    prompts, lengths = plan()
    count = GROUPS * SIZE
    held = [list(prompts[i // SIZE]) for i in range(count)]
    start = time.process_time()
    for turn in range(TURNS):
        width = max(map(len, held))
        ids = torch.tensor([[0] * (width - len(h)) + h for h in held])
        mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in held])
        most = max(row[turn] for row in lengths)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=True,
            temperature=1.0, top_k=0, pad_token_id=0,
        )  # fmt: skip
        for i in range(count):
            held[i] += out[i, width : width + lengths[i][turn]].tolist() + seen(i, turn)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder = initialise(CONFIG, 0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
    with tempfile.TemporaryDirectory() as name:
        save_decoder(decoder, Path(name))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    found: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(options.turns):
        found["ours"].append(ours(decoder))
        found["transformers"].append(theirs(model))
    tokens = sum(map(sum, plan()[1]))
    middle = {side: statistics.median(times) for side, times in found.items()}
    result = {"tokens": tokens, "cpu_sec": middle,
              "tokens_per_cpu_sec": {s: round(tokens / t) for s, t in middle.items()},
              "ratio": round(middle["transformers"] / middle["ours"], 2), "all": found}  # fmt: skip
    tell(result, options.out)


if __name__ == "__main__":
    main()
