"""B7: CPU seconds from random weights to a reward of .9 on a toy task (toy_tool.py), ours (embedded
engine, our update) and TRL's GRPOTrainer (transformers.generate turn by turn in its rollout
function). The same model, seeds, rewards, batch and learning rate; fp32, one thread.

    python benchmarks/trainer/b7_reward.py --out benchmarks/trainer/b7.json    (needs trl==1.16.0)
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from result import tell
from toy_tool import CONFIG, END, GROUPS, MOST, SIZE, TURNS, Trial, trials

from nanoswe_proxy.engine.base import Sampling
from nanoswe_trainer import tiny
from nanoswe_trainer.algo import group_advantages, policy_loss
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.model import initialise, load_decoder, save_decoder
from nanoswe_trainer.pack import Row
from nanoswe_trainer.recipe import TrainSection
from nanoswe_trainer.worker import Worker

RATE, WANTED, LIMIT = 3e-3, 0.9, 300


def ours(folder: Path, seed: int) -> tuple[list[float], float]:
    """Mean reward of each step, and CPU seconds."""
    began, rewards = time.process_time(), []
    worker = Worker(load_decoder(folder))
    worker.begin(learning_rate=RATE)
    loss = partial(policy_loss, train=TrainSection(preset="dapo"))

    async def one(engine: LocalEngine, name: str, trial: Trial) -> None:
        for _ in range(TURNS):
            sampling = Sampling(1.0, MOST, (END,), f"{seed}/{name}")
            drawn = [s async for s in engine.generate(name, trial.ids, sampling)]
            trial.reply([s.token for s in drawn], [s.logprob for s in drawn])
        await engine.release(name)

    async def main() -> None:
        with ThreadPoolExecutor(1) as compute:
            engine = LocalEngine(worker.decoder, slots=64, max_context=256, compute=compute)
            for step in range(LIMIT):
                drawn = trials(seed, step)
                await asyncio.gather(*(one(engine, f"{step}.{i}", t) for i, t in enumerate(drawn)))
                rewards.append(statistics.mean(t.earned / TURNS for t in drawn))
                if rewards[-1] >= WANTED:
                    return
                await engine.update(partial(worker.step, rows_of(drawn), loss))

    asyncio.run(main())
    return rewards, time.process_time() - began


def rows_of(drawn: list[Trial]) -> list[Row]:
    rows, total = [], sum(sum(t.mask) for t in drawn)
    for first in range(0, len(drawn), SIZE):
        group = drawn[first : first + SIZE]
        values = group_advantages([t.earned for t in group], kind="mean_std").values
        rows += [Row(tuple(t.ids), tuple(m / total for m in t.mask), (v,) * len(t.ids),
                     tuple(t.logprobs)) for t, v in zip(group, values, strict=True)
                 if v is not None]  # fmt: skip
    return rows


def trl(folder: Path, seed: int) -> tuple[list[float], float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
    from trl import GRPOConfig, GRPOTrainer

    set_seed(seed)
    began, rewards = time.process_time(), []

    class Reached(Exception): ...

    @torch.no_grad()
    def rollout(prompts: list, trainer: GRPOTrainer) -> dict:
        drawn = trials(seed, len(rewards))
        firsts = [len(t.ids) for t in drawn]
        trainer.model.eval()
        for _ in range(TURNS):
            width = max(len(t.ids) for t in drawn)
            ids = torch.tensor([[0] * (width - len(t.ids)) + t.ids for t in drawn])
            mask = torch.tensor([[0] * (width - len(t.ids)) + [1] * len(t.ids) for t in drawn])
            out = trainer.model.generate(
                ids, attention_mask=mask, max_new_tokens=MOST, do_sample=True, temperature=1.0,
                top_k=0, pad_token_id=63, eos_token_id=END,
            )[:, width:].tolist()  # fmt: skip
            for t, reply in zip(drawn, out, strict=True):
                stop = reply.index(END) + 1 if END in reply else len(reply)
                t.reply(reply[:stop], [0.0] * stop)
        trainer.model.train()
        rewards.append(statistics.mean(t.earned / TURNS for t in drawn))
        if rewards[-1] >= WANTED or len(rewards) == LIMIT:
            raise Reached
        ends = list(zip(drawn, firsts, strict=True))
        return {"prompt_ids": [t.ids[:n] for t, n in ends], "earned": [t.earned for t in drawn],
                "completion_ids": [t.ids[n:] for t, n in ends],
                "env_mask": [t.mask[n:] for t, n in ends],
                "logprobs": [t.logprobs[n:] for t, n in ends]}  # fmt: skip

    file, pad = str(folder / "tokenizer.json"), "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, pad_token=pad, eos_token="<|im_end|>")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda earned, **_: earned,
        args=GRPOConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=GROUPS * SIZE, use_cpu=True,
            num_generations=SIZE, max_steps=LIMIT, max_completion_length=256, beta=0.0,
            loss_type="dapo", epsilon_high=0.28, bf16=False, report_to="none", save_strategy="no",
            logging_steps=1000, learning_rate=RATE, lr_scheduler_type="constant",
            adam_beta2=0.95, gradient_checkpointing=False, disable_tqdm=True, seed=seed,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * GROUPS}), processing_class=tokenizer,
        rollout_func=rollout,
    )  # fmt: skip
    with suppress(Reached):
        trainer.train()
    return rewards, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "FOLDER", "SEED"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        side, folder, seed = options.one
        sys.stdout.write(
            "\n" + json.dumps({"ours": ours, "trl": trl}[side](Path(folder), int(seed)))
        )
        return
    found: dict[str, list] = {"ours": [], "trl": []}
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            tiny.create(Path(name), seed)
            save_decoder(initialise(CONFIG, seed), Path(name))
            for side, rows in found.items():
                command = [sys.executable, __file__, "--one", side, name, str(seed)]
                env = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True, env=env
                )
                rewards, spent = json.loads(done.stdout.splitlines()[-1])
                rows.append({"seed": seed, "steps": len(rewards), "reward": rewards[-1],
                             "cpu_sec": round(spent, 2)})  # fmt: skip
                sys.stderr.write(f"{side} {rows[-1]}\n")
    middle = {side: statistics.median(r["cpu_sec"] for r in rows) for side, rows in found.items()}
    steps = {side: statistics.median(r["steps"] for r in rows) for side, rows in found.items()}
    tell({"cpu_sec": middle, "steps": steps, "ratio": round(middle["trl"] / middle["ours"], 2),
          "runs": found}, options.out)  # fmt: skip


if __name__ == "__main__":
    main()
