"""Training through a real vLLM server (its CPU build). Collected where vLLM is installed: `nox
--session vllm`.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoswe_harbor.convert import convert_nano
from nanoswe_proxy.engine.base import Sampling
from nanoswe_proxy.errors import EngineError
from nanoswe_trainer.engine.vllm import TOLERANCE, VllmEngine, serve_vllm
from nanoswe_trainer.model import Decoder, ModelConfig, initialise
from nanoswe_trainer.worker import Worker

pytestmark = pytest.mark.interop
CONFIG = ModelConfig(
    vocab_size=304, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32
)
RECIPE = """
name: served
tasks: {path: TASKS/train}
agent: {max_turns: 3}
model: {max_tokens: 16}
eval: {attempts: 2, concurrency: 8}
sft: {steps: 6, batch: 16, warmup_steps: 2}
train: {steps: 3, groups: 2, group_size: 4, depth: 1, truncated: train}
cluster: {engine: vllm, max_context: 256, train_threads: 1}
"""


def served(decoder: Decoder, folder: Path, compute: ThreadPoolExecutor):
    return serve_vllm(
        Worker(decoder), folder, sys.executable, ["--enforce-eager"], max_context=256,
        slots=8, bf16=False, version=0, compute=compute,
    )  # fmt: skip


def nudge(decoder: Decoder) -> None:
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape))


async def draw(engine: VllmEngine, session: str, tokens: int) -> list:
    sampling = Sampling(1.0, tokens, (), session)
    drawn = [s async for s in engine.generate(session, list(range(1, 20)), sampling)]
    await engine.release(session)
    return drawn


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_arrive_whole_and_a_wrong_one_is_noticed(
    tied: bool, randomise: Callable[[Decoder], Decoder], tmp_path: Path,
    compute: ThreadPoolExecutor,
) -> None:  # fmt: skip
    decoder = randomise(initialise(replace(CONFIG, tie_word_embeddings=tied), 3))

    async def main() -> None:
        async with served(decoder, tmp_path, compute) as engine:
            for version in range(1, 4):
                await engine.update(lambda: nudge(decoder))
                assert engine.version == version
                assert await engine.probe() <= TOLERANCE["float32"]
            assert sorted(p.name for p in tmp_path.glob("0*")) == ["000002", "000003"]

            # in the middle of turns: sampling goes on, under the next version
            turns = [asyncio.create_task(draw(engine, f"s{i}", 230)) for i in range(4)]
            while engine.generated < 8:
                await asyncio.sleep(0.001)
            await engine.update(lambda: nudge(decoder))
            for drawn in await asyncio.gather(*turns):
                versions = [s.version for s in drawn]
                assert len(drawn) == 230 and versions == sorted(versions)
                assert set(versions) <= {3, 4} and versions[-1] == 4

            # one tensor that the server does not have is a failure, not a slow drift
            with torch.no_grad():
                decoder.model.layers[1].self_attn.o_proj.weight.neg_()
            with pytest.raises(EngineError, match="does not sample with these weights"):
                await engine.probe()
            with torch.no_grad():
                decoder.model.layers[1].self_attn.o_proj.weight.neg_()

            # a server that dies is started again with the weights it had
            assert engine._process is not None
            os.killpg(engine._process.pid, signal.SIGKILL)
            while engine._up.is_set():
                await asyncio.sleep(0.05)
            assert {s.version for s in await draw(engine, "after", 5)} == {4}
            await engine.update(lambda: nudge(decoder))
            assert {s.version for s in await draw(engine, "later", 5)} == {5}

    asyncio.run(asyncio.wait_for(main(), 600))


def test_a_run_through_vllm(tmp_path: Path) -> None:
    convert_nano(tmp_path, {"train": 4, "heldout": 2})
    (tmp_path / "served.yaml").write_text(RECIPE.replace("TASKS", str(tmp_path)))
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(tmp_path / "served.yaml")]
    command += [f"cluster.vllm={sys.executable}", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "runs" / "served"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == "rl"]
    assert len(steps) == 3 and all(row["age_max"] <= 2 for row in steps)
    assert all(row["trials_without_reward"] == 0 for row in steps)
    gaps = [row["logprob_gap"] for row in steps if "logprob_gap" in row and not row["age_max"]]
    assert all(gap < 1e-3 for gap in gaps)


def test_without_vllm_one_line_says_what_to_do(tmp_path: Path) -> None:
    convert_nano(tmp_path, {"train": 1, "heldout": 1})
    (tmp_path / "served.yaml").write_text(RECIPE.replace("TASKS", str(tmp_path)))
    command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(tmp_path / "served.yaml")]
    command += ["cluster.vllm=/nowhere/python", "sft.steps=0", "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == "error: /nowhere/python: no such Python; ./just setup vllm, or set cluster.vllm"
