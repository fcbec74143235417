"""B6: ragged conversations, four prompts of eight attempts and six turns: CPU seconds a sampled
token of the embedded engine, and of transformers.generate called turn by turn on the padded batch,
as a loop without an engine does. The same random weights, prompts and lengths; fp32, one thread.
B5: 32 prompts, each with one reply, all of one length: plain decoding, where generate is at its
best.

    python benchmarks/trainer/b6_turns.py --out benchmarks/trainer/b6.json
    python benchmarks/trainer/b6_turns.py --equal --out benchmarks/trainer/b5.json
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
GROUPS, SIZE, TURNS, PROMPT, SEEN, EQUAL = 4, 8, 6, 100, 20, 128
Plan = tuple[list[list[int]], list[list[int]]]


def plan(equal: bool) -> Plan:
    """Of each conversation its prompt, and how many tokens to sample in each of its turns."""
    rng, count = random.Random(2), GROUPS * SIZE
    different = count if equal else GROUPS
    prompts = [[rng.randrange(1000) for _ in range(PROMPT)] for _ in range(different)]
    if equal:
        return prompts, [[EQUAL]] * count
    lengths = [[int(min(64, 4 + rng.lognormvariate(2.5, 0.8))) for _ in range(TURNS)]
               for _ in range(count)]  # fmt: skip
    return [prompts[i // SIZE] for i in range(count)], lengths


def seen(i: int, turn: int) -> list[int]:
    """What the environment answers."""
    rng = random.Random(f"{i}/{turn}")
    return [rng.randrange(1000) for _ in range(SEEN)]


def ours(decoder: Decoder, planned: Plan) -> float:
    prompts, lengths = planned

    async def one(engine: LocalEngine, i: int) -> None:
        ids = list(prompts[i])
        for turn, n in enumerate(lengths[i]):
            sampling = Sampling(1.0, n, (), f"{i}")
            ids += [s.token async for s in engine.generate(f"{i}", ids, sampling)]
            ids += seen(i, turn)
        await engine.release(f"{i}")

    async def all_of_them() -> float:
        with ThreadPoolExecutor(1) as compute:
            engine = LocalEngine(decoder, slots=GROUPS * SIZE, max_context=640, compute=compute)
            start = time.process_time()  # neither side's model is made in it
            await asyncio.gather(*(one(engine, i) for i in range(GROUPS * SIZE)))
            return time.process_time() - start

    return asyncio.run(all_of_them())


def theirs(model: torch.nn.Module, planned: Plan) -> float:
    prompts, lengths = planned
    count, held = len(prompts), [list(prompt) for prompt in prompts]
    start = time.process_time()
    for turn in range(len(lengths[0])):
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
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    planned = plan(options.equal)
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
        found["ours"].append(ours(decoder, planned))
        found["transformers"].append(theirs(model, planned))
    tokens = sum(map(sum, planned[1]))
    middle = {side: statistics.median(times) for side, times in found.items()}
    result = {"tokens": tokens, "cpu_sec": middle,
              "tokens_per_cpu_sec": {s: round(tokens / t) for s, t in middle.items()},
              "ratio": round(middle["transformers"] / middle["ours"], 2), "all": found}  # fmt: skip
    tell(result, options.out)


if __name__ == "__main__":
    main()
