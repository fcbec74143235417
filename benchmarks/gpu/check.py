"""Is the trainer right, and fast, on this GPU? Phases 0-3, 5 and 6 in under 240 s; 7 and 8 by flag.

Random weights from configurations, the embedded engine, torch alone: a bare GPU machine is enough.
Each phase is boxed in time and writes its JSON line to --out when it ends, with the card and the
versions in the first. `--toy` is the same script at toy size on a CPU, in under two minutes; its
speeds say nothing, its correctness does. Exit code 1: a bar was missed.

    python benchmarks/gpu/check.py --out benchmarks/gpu/h200.jsonl
    python benchmarks/gpu/check.py --toy --phases 0,1,2,3,5,6,7,8
"""

import argparse
import asyncio
import math
import platform
import random
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from machine import LOSS, QWEN3_4B, TOY, Bench, update

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_trainer import checkpoint, logprob
from nanoswe_trainer.algo import group_advantages
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.model import Decoder, initialise
from nanoswe_trainer.pack import Batch, Row, pack
from nanoswe_trainer.sched import Schedule
from nanoswe_trainer.worker import Worker, nll


def phase_0(bench: Bench) -> None:
    """What this is, and its ceiling: the fastest matrix product."""
    began, n = bench.sync(), 512 if bench.toy else 8192
    dtype = torch.float32 if bench.toy else torch.bfloat16
    a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        start = bench.sync()
        a @ b
        times.append(bench.sync() - start)
    bench.ceiling = 2 * n**3 / min(times)
    card = "CPU" if bench.toy else torch.cuda.get_device_name()
    bench.say(0, began, {}, device=card, torch=torch.__version__, cuda=torch.version.cuda,
              python=platform.python_version(), toy=bench.toy,
              tflops=round(bench.ceiling / 1e12, 2))  # fmt: skip


def head_gradient(decoder: Decoder, batch: Batch, rows: int, bf16: bool) -> torch.Tensor:
    """Of the head's weights, with so many rows a chunk."""
    whole, logprob.CHUNK = logprob.CHUNK, rows
    found, _ = token_logprobs(decoder, batch, bf16=bf16)
    logprob.CHUNK = whole
    (gradient,) = torch.autograd.grad(found.sum(), decoder.model.embed_tokens.weight)
    return gradient


def phase_1(bench: Bench) -> None:
    """Packed against document by document; the head in chunks against plain; on-policy ratio 1; and
    this device against the CPU.
    """
    began = bench.sync()
    config = replace(TOY, head_dim=64)  # what the variable-length kernel takes
    decoder = bench.made(config)
    rows = bench.rows([3, 40, 17, 128, 64], config)
    batch = pack(rows).to(bench.device)
    packed, _ = token_logprobs(decoder, batch, bf16=bench.bf16)
    alone = torch.cat([
        token_logprobs(decoder, pack([row]).to(bench.device), bf16=bench.bf16)[0] for row in rows
    ])  # fmt: skip
    there = initialise(config, 0)
    there.load_state_dict({k: v.cpu() for k, v in decoder.state_dict().items()})
    exact, _ = token_logprobs(there, pack(rows))
    here = packed.detach().cpu() - exact.detach()
    chunked, plain = (head_gradient(decoder, batch, n, bench.bf16) for n in (70, logprob.CHUNK))
    on_policy = replace(batch, behaviour_N=packed.detach())
    _, numbers = LOSS(packed, on_policy)
    tolerance = 1e-4 if bench.toy else 0.05
    gap, from_cpu = (packed - alone).abs().max().item(), here.abs().max().item()
    bars = {
        "packed == alone": gap < tolerance, "device == CPU": from_cpu < 4 * tolerance,
        "head": ((plain - chunked).abs().max() / plain.abs().max()).item() < tolerance,
        "ratio 1": abs(numbers["ratio_mean"] - batch.weights_N.sum().item()) < 1e-5,
        "no clipping": numbers["clip_fraction_low"] + numbers["clip_fraction_high"] == 0,
    }  # fmt: skip
    bench.say(1, began, bars, packed_gap=gap, cpu_gap=from_cpu)


def phase_2(bench: Bench) -> None:
    """Qwen3-0.6B's shape, full RL, one document, as in prime-rl's table (one H100: 16k tokens 11.9k
    tok/s, 11.1 %; 65k 10.2k, 26.8 %).
    """
    began, k = bench.sync(), 1024 // bench.scale
    found = {"16k": update(bench, bench.small, [16 * k]),
             "65k": update(bench, bench.small, [64 * k], steps=2),
             "16k kept": update(bench, bench.small, [16 * k], recompute=False)}  # fmt: skip
    bench.base = found["16k"]["tokens_per_sec"]
    bars = {} if bench.toy else {
        "16k > 30k tok/s": found["16k"]["tokens_per_sec"] > 30_000,
        "16k > 30 %": found["16k"]["mfu_peer"] > 0.3, "65k > 40 %": found["65k"]["mfu_peer"] > 0.4,
    }  # fmt: skip
    bench.say(2, began, bars, **found)


def phase_3(bench: Bench) -> None:
    """Lengths as trials have them: lognormal, mean 8k, at most 64k, 128k tokens a step."""
    began, rng, lengths = bench.sync(), random.Random(0), []
    while sum(lengths) < 131072 // bench.scale:
        n = rng.lognormvariate(math.log(8192) - 0.32, 0.8)
        lengths.append(max(8, int(min(n, 65536) / bench.scale)))
    found = update(bench, bench.small, lengths, steps=2)
    speed = found["tokens_per_sec"] / bench.base if hasattr(bench, "base") else 1.0
    bars = {} if bench.toy else {"within 10 % of phase 2": speed > 0.9}
    bench.say(3, began, bars, documents=len(lengths), to_phase_2=round(speed, 3), **found)


async def decode(engine: LocalEngine, count: int, prompt: int, new: int) -> list[list[Sampled]]:
    async def one(i: int) -> list[Sampled]:
        rng = random.Random(i)
        ids = [rng.randrange(500) for _ in range(prompt)]
        sampling = Sampling(1.0, new, (), f"s{i}")
        got = [s async for s in engine.generate(f"s{i}", ids, sampling)]
        await engine.release(f"s{i}")
        return got

    return await asyncio.gather(*(one(i) for i in range(count)))


def phase_5(bench: Bench) -> None:
    """The embedded engine: speed, agreement with the trainer, and no dependence on company."""
    began, facts = bench.sync(), {}
    decoder, (prompt, new) = bench.made(bench.small), (8, 8) if bench.toy else (128, 128)
    with ThreadPoolExecutor(1) as compute:
        for slots in (4, 16) if bench.toy else (64, 256):
            engine = LocalEngine(
                decoder,
                slots=slots,
                max_context=prompt + new + 64,
                compute=compute,
                bf16=bench.bf16,
            )
            start = bench.sync()
            drawn = asyncio.run(decode(engine, slots, prompt, new))
            facts[f"tokens_per_sec_{slots}"] = round(slots * new / (bench.sync() - start))
        alone = asyncio.run(decode(engine, 1, prompt, new))[0]
    rng = random.Random(0)
    ids = [rng.randrange(500) for _ in range(prompt)] + [s.token for s in alone]
    row = Row(tuple(ids), tuple([0.0] * prompt + [1.0] * new))
    with torch.no_grad():
        ours, _ = token_logprobs(decoder, pack([row]).to(bench.device), bf16=bench.bf16)
    gaps = (ours.cpu() - torch.tensor([s.logprob for s in alone])).abs()
    same = [s.token for s in alone] == [s.token for s in drawn[0]]
    bars = {"mean |dlogp| < 5e-3": gaps.mean().item() < 5e-3, "batch invariant": same}
    bench.say(5, began, bars, mean_dlogp=gaps.mean().item(), max_dlogp=gaps.max().item(), **facts)


def phase_6(bench: Bench) -> None:
    """Asynchronous RL on one device, depth 1, age at most 2: reward is the share of even tokens."""
    began, steps = bench.sync(), 12 if bench.toy else 30
    decoder = bench.made(TOY)
    with torch.no_grad():
        decoder.model.embed_tokens.weight.mul_(0.3)
    worker = Worker(decoder, bf16=False)
    worker.begin(learning_rate=3e-3)
    rewards, ages, publish = [], [], []

    async def run(compute: ThreadPoolExecutor) -> None:
        engine = LocalEngine(decoder, slots=32, max_context=64, compute=compute)
        plan, ended = Schedule(4, 1, 2), {}
        news, following = asyncio.Event(), 0

        async def group(number: int) -> None:
            async def one(i: int) -> list[Sampled]:
                name = f"{number}.{i}"
                sampling = Sampling(1.0, 8, (), name)
                got = [s async for s in engine.generate(name, [1, 2, 3, number % 7], sampling)]
                await engine.release(name)
                return got

            ended[number] = await asyncio.gather(*(one(i) for i in range(8)))
            plan.finish(number)
            news.set()

        async with asyncio.TaskGroup() as running:
            for step in range(steps):
                while plan.may_admit and len(plan.live) < (steps - step) * 4:
                    plan.admit(following)
                    running.create_task(group(following))
                    following += 1
                while not plan.full:
                    news.clear()
                    await news.wait()
                rows = []
                for number in sorted(plan.batch):
                    drawn = ended.pop(number)
                    got = [sum(s.token % 2 == 0 for s in d) / len(d) for d in drawn]
                    rewards.append(statistics.fmean(got))
                    values = group_advantages(got).values
                    for d, value in zip(drawn, values, strict=True):
                        ages.append(engine.version - min(s.version for s in d))
                        ids = (1, 2, 3, number % 7, *(s.token for s in d))
                        weights = (0.0,) * 4 + (1 / 256,) * len(d)
                        behaviour = (0.0,) * 4 + tuple(s.logprob for s in d)
                        rows.append(Row(ids, weights, (value or 0.0,) * len(ids), behaviour))
                start = bench.sync()
                await engine.update(lambda rows=rows: worker.step(rows, LOSS))
                publish.append(bench.sync() - start)
                plan.trained()

    with ThreadPoolExecutor(1) as compute:
        asyncio.run(run(compute))
    first, last = statistics.fmean(rewards[:8]), statistics.fmean(rewards[-8:])
    bars = {"reward rises": last > first + 0.05, "age <= 2": max(ages) <= 2}
    bench.say(6, began, bars, first=round(first, 3), last=round(last, 3), age_max=max(ages),
              update_sec=round(statistics.median(publish), 4))  # fmt: skip


def phase_7(bench: Bench) -> None:
    """Saved, loaded into another worker, and on: equal to the bit."""
    began = bench.sync()
    torch.use_deterministic_algorithms(True, warn_only=True)
    rows = bench.rows([40, 17, 90], TOY)
    config = replace(TOY, head_dim=64)

    def worker(seed: int) -> Worker:
        made = Worker(bench.made(config, seed), bf16=bench.bf16)
        made.begin(learning_rate=1e-3)
        return made

    first, again = worker(0), worker(1)
    first.step(rows, nll)
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder), checkpoint.Position("rl", 1), "d", {})
        again.load(Path(folder), "d", optimizers=True)
    numbers = [[w.step(rows, nll) for _ in range(3)] for w in (first, again)]
    pairs = zip(first.decoder.parameters(), again.decoder.parameters(), strict=True)
    equal = numbers[0] == numbers[1] and all(torch.equal(p, q) for p, q in pairs)
    torch.use_deterministic_algorithms(False)
    bench.say(7, began, {"bit-equal": equal})


def phase_8(bench: Bench) -> None:
    """Qwen3-4B's shape at 16k tokens: all weights, and LoRA."""
    began, config = bench.sync(), TOY if bench.toy else QWEN3_4B
    length = [16384 // bench.scale]
    found = {"full": update(bench, config, length, steps=2),
             "lora 32": update(bench, config, length, steps=2, lora=32)}  # fmt: skip
    bench.say(8, began, {}, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phases", default="0,1,2,3,5,6")
    parser.add_argument("--toy", action="store_true", help="at toy size, on a CPU")
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    options = parser.parse_args()
    if not options.toy and not torch.cuda.is_available():
        parser.error("no GPU here; --toy rehearses it on a CPU")
    bench = Bench(options.toy, options.out)
    bench.ceiling = 1.0
    for number in options.phases.split(","):
        globals()[f"phase_{number}"](bench)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    sys.exit(1 if bench.missed else 0)


if __name__ == "__main__":
    main()
