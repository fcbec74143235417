"""The embedded engine against a full recompute by the trainer, alone and in company."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.engine.vllm import VllmEngine
from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.model import Decoder
from nanoswe_trainer.pack import Row, pack
from nanoswe_trainer.worker import Worker

STOP = 49


def engine_of(
    decoder: Decoder, compute: ThreadPoolExecutor, slots: int = 16, context: int = 96
) -> LocalEngine:
    return LocalEngine(decoder, slots=slots, max_context=context, compute=compute)


async def turn(
    engine: LocalEngine, session: str, ids: list[int], n: int = 8, temperature: float = 1.0
) -> list[Sampled]:
    sampling = Sampling(temperature=temperature, max_tokens=n, stop_ids=(STOP,), seed_key=session)
    return [s async for s in engine.generate(session, ids, sampling)]


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(49) for _ in range(n)]


async def two_turns(
    engine: LocalEngine, session: str, length: int
) -> tuple[list[int], list[Sampled]]:
    ids = prompt(length, length)
    first = await turn(engine, session, ids)
    ids = ids + [s.token for s in first] + prompt(length + 1, 7)
    second = await turn(engine, session, ids)
    await engine.release(session)
    return ids + [s.token for s in second], first + second


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # norms keep their weights in fp32
def test_logprobs_in_bf16_stay_near_the_trainers(
    small: Decoder, compute: ThreadPoolExecutor
) -> None:
    ids = prompt(1, 45)

    async def main() -> list[Sampled]:
        engine = LocalEngine(small, slots=4, max_context=96, compute=compute, bf16=True)
        return await turn(engine, "a", ids, 20)

    drawn = asyncio.run(main())
    row = Row((*ids, *(s.token for s in drawn)), (0.0,) * len(ids) + (1.0,) * len(drawn))
    sampled = torch.tensor([s.logprob for s in drawn])
    with torch.no_grad():
        half, _ = token_logprobs(small, pack([row]), bf16=True)
        full, _ = token_logprobs(small, pack([row]))
    assert 5e-6 < (full - sampled).abs().max() < 0.3  # fp32 differs by less than 2e-6
    assert (half - sampled).abs().max() < 0.3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_equal_the_trainers(
    small: Decoder, compute: ThreadPoolExecutor, temperature: float
) -> None:
    async def main() -> tuple[list[int], list[Sampled]]:
        ids = prompt(1, 45)
        out = await turn(engine_of(small, compute), "a", ids, 20, temperature)
        return ids + [s.token for s in out], out

    ids, sampled = asyncio.run(main())
    row = Row(tuple(ids), tuple([0.0] * (len(ids) - len(sampled)) + [1.0] * len(sampled)))
    with torch.no_grad():
        logprobs, _ = token_logprobs(small, pack([row]), temperature=temperature)
    gaps = (logprobs - torch.tensor([s.logprob for s in sampled])).abs()
    assert gaps.max() <= 2e-6


def test_greedy_equals_a_full_recompute(small: Decoder, compute: ThreadPoolExecutor) -> None:
    ids = prompt(2, 33)
    out = asyncio.run(turn(engine_of(small, compute), "a", ids, 10, temperature=0.0))
    for sampled in out:
        row = Row(tuple([*ids, 0]), tuple([0.0] * len(ids) + [1.0]))
        best = max(range(50), key=lambda t: score(small, row, t))
        assert sampled.token == best
        ids = [*ids, best]


def score(decoder: Decoder, row: Row, token: int) -> float:
    with torch.no_grad():
        return token_logprobs(decoder, pack([Row((*row.tokens[:-1], token), row.weights)]))[
            0
        ].item()


@pytest.mark.parametrize("steady", [True, False])
def test_output_does_not_depend_on_company_or_arrival(
    small: Decoder, compute: ThreadPoolExecutor, steady: bool
) -> None:
    """Also as it works where a machine's numbers change with what is computed beside them."""
    lengths = [3, 20, 31, 32, 33, 40, 50, 64, 65, 12, 9]

    def new_engine() -> LocalEngine:
        engine = engine_of(small, compute)
        if not steady:
            engine._cache.steady, engine._cache.span = False, engine._cache.room
        return engine

    async def crowd(order: list[int]) -> dict[int, list[Sampled]]:
        engine = new_engine()

        async def one(delay: int, n: int) -> tuple[int, list[Sampled]]:
            await asyncio.sleep(0.003 * delay)
            return n, (await two_turns(engine, f"s{n}", n))[1]

        return dict(await asyncio.gather(*(one(i, n) for i, n in enumerate(order))))

    async def alone() -> dict[int, list[Sampled]]:
        return {n: (await two_turns(new_engine(), f"s{n}", n))[1] for n in lengths}

    want = asyncio.run(alone())
    shuffled = random.Random(0).sample(lengths, len(lengths))
    assert asyncio.run(crowd(lengths)) == want
    assert asyncio.run(crowd(shuffled)) == want


def test_attempts_at_a_task_prefill_its_prompt_once(
    small: Decoder, compute: ThreadPoolExecutor
) -> None:
    """And sample what each would have alone; so does one whose prompt parts from theirs."""
    ids, other = prompt(7, 75), [*prompt(7, 50), *prompt(8, 20)]
    asked = {f"a{i}": ids for i in range(6)} | {"b": other}

    async def main() -> None:
        engine, computed = engine_of(small, compute), []
        forward = engine._cache.forward

        def counted(pieces: list, ready: int) -> torch.Tensor:
            computed.extend(len(piece[2]) for piece in pieces[ready:])
            return forward(pieces, ready)

        engine._cache.forward = counted  # type: ignore[method-assign]
        together = await asyncio.gather(*(turn(engine, name, row) for name, row in asked.items()))
        # 32 tokens are everybody's; 42 more are the six's, 37 more are the other's
        assert sum(computed) == 32 + 42 + 37
        for (name, row), drawn in zip(asked.items(), together, strict=True):
            assert await turn(engine_of(small, compute), name, row) == drawn
        await engine.release("a0")
        late = await turn(engine, "a6", ids)
        assert sum(computed) == 32 + 42 + 37
        assert late == await turn(engine_of(small, compute), "a6", ids)

    asyncio.run(main())


def test_kept_prefix_equals_a_fresh_prefill(small: Decoder, compute: ThreadPoolExecutor) -> None:
    async def main() -> None:
        engine = engine_of(small, compute)
        ids = prompt(40, 40)
        ids = ids + [s.token for s in await turn(engine, "a", ids)] + prompt(41, 7)
        kept = await turn(engine, "a", ids)
        fresh = await turn(engine_of(small, compute), "a", ids)
        assert [s.token for s in kept] == [s.token for s in fresh]
        assert [s.logprob for s in kept] == pytest.approx([s.logprob for s in fresh], abs=2e-6)

    asyncio.run(main())


def test_new_weights_change_the_version_and_nothing_stale_remains(
    small: Decoder, compute: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        engine = engine_of(small, compute)
        ids = prompt(5, 40)
        first = await turn(engine, "a", ids)
        with torch.no_grad():
            small.model.layers[0].mlp.down_proj.weight.mul_(3.0)
        await engine.update(lambda: None)
        second = await turn(engine, "a", ids)
        fresh = await turn(engine_of(small, compute), "a", ids)
        assert {s.version for s in first} == {0} and {s.version for s in second} == {1}
        assert [(s.token, s.logprob) for s in second] == [(s.token, s.logprob) for s in fresh]

    asyncio.run(main())


def test_new_weights_in_the_middle_of_a_turn(small: Decoder, compute: ThreadPoolExecutor) -> None:
    """What was sampled keeps its version; the rest is what a fresh prefill would have sampled."""

    def change() -> None:
        with torch.no_grad():
            small.model.layers[0].mlp.down_proj.weight.mul_(3.0)

    async def main() -> None:
        engine, ids = engine_of(small, compute), prompt(5, 40)
        sampling = Sampling(1.0, 12, (), "key")
        drawn = []
        async for sampled in engine.generate("a", ids, sampling):
            drawn.append(sampled)
            if len(drawn) == 4:
                await engine.update(change)
        assert [s.version for s in drawn] == sorted(s.version for s in drawn)
        old = [s.token for s in drawn if s.version == 0]
        assert 4 <= len(old) < 12 == len(drawn)
        rest = Sampling(1.0, 12 - len(old), (), "key")
        fresh = engine_of(small, compute).generate("a", [*ids, *old], rest)
        again = [(s.token, s.logprob) async for s in fresh]
        assert [(s.token, s.logprob) for s in drawn[len(old) :]] == again

    asyncio.run(main())


def test_slots_are_given_back(small: Decoder, compute: ThreadPoolExecutor) -> None:
    async def main() -> None:
        engine = engine_of(small, compute, slots=8)
        for start in range(0, 40, 20):
            await asyncio.gather(
                *(two_turns(engine, f"s{start + i}", 5 + i % 3) for i in range(20))
            )
        async for _ in engine.generate("gone", [1, 2], Sampling(1.0, 50, (), "x")):
            break  # the caller goes away in the middle of a turn
        await engine.release("gone")
        await engine.release("never seen")
        await asyncio.gather(*(two_turns(engine, f"t{i}", 6) for i in range(8)))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_context_is_a_hard_limit(small: Decoder, compute: ThreadPoolExecutor) -> None:
    async def main() -> None:
        engine = engine_of(small, compute, context=64)
        out = await turn(engine, "a", prompt(1, 60), 50, temperature=0.0)
        assert len(out) <= 4
        for bad in ([], prompt(1, 64)):
            with pytest.raises(ValueError, match="does not fit"):
                await turn(engine, "b", bad)

    asyncio.run(main())


def test_a_resumed_run_keeps_the_weights_it_goes_on_with(
    small: Decoder, compute: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Killed at version 7, resumed at 5: what is there of the later ones goes, not what is new."""
    for version in (6, 7):
        (tmp_path / f"{version:06}").mkdir()
    facts = {"max_context": 96, "version": 5, "half": False, "tolerance": 1e-3}
    engine = VllmEngine([], worker=Worker(small), folder=tmp_path, compute=compute, **facts)
    for version, left in ((5, ["000005"]), (6, ["000005", "000006"]), (7, ["000006", "000007"])):
        assert (asyncio.run(engine.publish(version)) / "model.safetensors").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == left
