"""B9: the controller alone: 1,000 sessions open at once, each of four turns, through parsing,
rendering, tokens and the session tree, then sealed, with an engine that computes nothing: turns a
second of this process; the same over HTTP, as an agent calls; and with the engine as an actor of a
Ray cluster, as a run on Ray has it.

    python benchmarks/trainer/b9_controller.py --out benchmarks/trainer/b9.json    (needs ray)
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ray
from result import tell

from nanoswe_proxy.app import serve
from nanoswe_proxy.dialects import chat
from nanoswe_proxy.engine.base import Engine, Sampled, Sampling
from nanoswe_proxy.exchange import follow
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_trainer import tiny
from nanoswe_trainer.cluster import actor
from nanoswe_trainer.engine.copied import HostedEngine
from nanoswe_trainer.model import load_decoder
from nanoswe_trainer.worker import Worker

TRIALS, TURNS, CONTEXT = 1000, 4, 1024
Ask = Callable[[str, bytes], Awaitable[dict]]  # capability, request → the reply's message


class Idle:
    """What a Host is, and a LocalEngine, without a model: every reply is two words."""

    version, max_context = 0, CONTEXT

    def __init__(self, reply: tuple[int, ...]):
        self.reply = reply

    async def turn(self, session: str, ids: Sequence[int], sampling: Sampling) -> list[Sampled]:
        return [Sampled(token, -1.0, 0) for token in (*self.reply, sampling.stop_ids[0])]

    async def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]:
        for sampled in await self.turn(session, ids, sampling):
            yield sampled

    async def release(self, session: str) -> None: ...


def inside(proxy: Proxy) -> Ask:
    async def ask(cap: str, raw: bytes) -> dict:
        wanted = chat.parse(raw)
        exchange = await proxy.call(cap, raw, wanted)
        reply = chat.Stream(wanted, cap, exchange.calls)
        reply.start()
        async for deltas in follow(exchange, False):
            for told in deltas:
                reply.delta(*told)
        reply.end()
        proxy.delivered(cap, exchange)
        return reply.whole()["choices"][0]["message"]

    return ask


async def turns_per_sec(proxy: Proxy, ask: Ask) -> float:
    everyone = asyncio.Barrier(TRIALS)

    async def trial(i: int) -> None:
        cap = proxy.open(f"t{i}")
        said = [{"role": "user", "content": f"mend the function {i} of the file"}]
        await everyone.wait()
        for _ in range(TURNS):
            said.append(await ask(cap, json.dumps({"model": "m", "messages": said}).encode()))
            said.append({"role": "user", "content": "go on"})
        await everyone.wait()
        sealed = await proxy.seal(cap)
        assert len(sealed.turns) == TURNS and sum(sealed.samples[-1].mask) == 3 * TURNS

    began = time.perf_counter()
    await asyncio.gather(*map(trial, range(TRIALS)))
    return TRIALS * TURNS / (time.perf_counter() - began)


async def over_http(proxy: Proxy) -> float:
    # The client is this process's too. Its pool walks over all that wait, so few may.
    limits, turnstile = httpx.Limits(max_connections=64), asyncio.Semaphore(64)
    async with serve(proxy), httpx.AsyncClient(limits=limits, timeout=600) as client:

        async def ask(cap: str, raw: bytes) -> dict:
            async with turnstile:
                response = await client.post(f"{proxy.base_url(cap)}/chat/completions", content=raw)
            return response.json()["choices"][0]["message"]

        return await turns_per_sec(proxy, ask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"in_process": [], "http": [], "ray": []}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as compute:
        folder = Path(name)
        tiny.create(folder, 0)
        renderer = Renderer(folder)
        words = tuple(renderer.codec.full.encode("py error", add_special_tokens=False).ids[:2])
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=10**8,
            log_to_driver=False,
        )
        hosted = HostedEngine(
            worker=Worker(load_decoder(folder)), folder=folder / "weights", max_context=CONTEXT,
            version=0, half=False, compute=compute, tolerance=0.0,
        )  # fmt: skip
        hosted.ask = actor(Idle, words)

        def once(engine: Engine, http: bool = False) -> float:
            proxy = Proxy(engine, renderer)
            return asyncio.run(over_http(proxy) if http else turns_per_sec(proxy, inside(proxy)))

        for _ in range(options.repeats):
            found["in_process"].append(once(Idle(words)))
            found["http"].append(once(Idle(words), http=True))
            found["ray"].append(once(hosted))
        ray.shutdown()
    tell({
        "live": TRIALS, "turns": TURNS, "ray_version": ray.__version__,
        "turns_per_sec": {way: round(statistics.median(rates)) for way, rates in found.items()},
        "all": found,
    }, options.out)  # fmt: skip


if __name__ == "__main__":
    main()
