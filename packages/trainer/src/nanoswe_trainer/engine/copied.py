"""Engines that sample with a copy of the weights while the trainer trains: how it is kept; and the
embedded engine as such a copy, in this process or as an actor on Ray.

In: a Worker, a folder that both sides see. Out: an `Engine`. New weights are a model folder, whole
or absent, named by its version. After each hand-over the copy must give a prompt's continuation the
logprobs that the trainer gives it. An actor that dies is started again, takes the newest weights
and is asked again what it had not answered: no turn is lost. Refuses (EngineError) a copy that
differs, and an actor that dies too often.
"""

import asyncio
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.errors import EngineError
from nanoswe_trainer.cluster import actor
from nanoswe_trainer.engine.local import LocalEngine
from nanoswe_trainer.model import load_decoder
from nanoswe_trainer.pack import Row
from nanoswe_trainer.worker import Worker

T = TypeVar("T")
PROBE_TOKENS = 8
VERSION = "[0-9]" * 6  # a folder of weights
log = logging.getLogger(__name__)


class CopiedEngine(ABC):
    """What its kinds share; `tolerance` is the greatest |logprob difference| of the probe."""

    def __init__(
        self, *, worker: Worker, folder: Path, max_context: int, version: int, half: bool,
        compute: ThreadPoolExecutor, tolerance: float,
    ):  # fmt: skip
        self.worker, self.folder, self.max_context = worker, folder.resolve(), max_context
        self.version, self.half, self.tolerance = version, half, tolerance
        self.generated, self._compute = 0, compute
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]: ...

    @abstractmethod
    async def release(self, session: str) -> None: ...

    @abstractmethod
    async def take(self, path: Path, version: int) -> None:
        """Sample with the weights of `path` from now on."""

    async def update(self, change: Callable[[], T]) -> T:
        """Change the weights, sampling going on meanwhile, and hand them over as a new version."""
        done = await self._computed(change)
        await self.hand_over(self.version + 1)
        return done

    async def hand_over(self, version: int) -> None:
        await self.take(await self.publish(version), version)
        self.version = version
        await self.probe()

    async def probe(self) -> float:
        """The greatest difference between the copy's and the trainer's logprobs of a few sampled
        tokens. Raises EngineError beyond the tolerance.
        """
        ids = [(7 * i + self.version) % 256 for i in range(1, 25)]
        sampling = Sampling(1.0, PROBE_TOKENS, (), f"probe/{self.version}")
        drawn = [s async for s in self.generate("probe", ids, sampling)]
        await self.release("probe")
        row = Row((*ids, *(s.token for s in drawn)), (0.0,) * len(ids) + (1.0,) * len(drawn))
        ours = await self._computed(lambda: self.worker.logprobs(row))
        gap = max(abs(x - s.logprob) for x, s in zip(ours, drawn, strict=True))
        if not gap <= self.tolerance:
            text = f"at version {self.version} the engine's logprobs differ from the trainer's"
            raise EngineError(f"{text} by up to {gap:.3g}: it does not sample with these weights")
        return gap

    async def publish(self, version: int) -> Path:
        """The trainer's weights as a model folder, whole or absent; the one before is kept."""
        path, part = self.folder / f"{version:06}", self.folder / f"{version:06}.part"

        def write() -> None:
            for old in (part, path):
                shutil.rmtree(old, ignore_errors=True)
            self.worker.export(part, half=self.half)
            part.rename(path)
            for old in self.folder.glob(VERSION):  # a resumed run finds later ones too
                if old.name not in (path.name, f"{version - 1:06}"):
                    shutil.rmtree(old)

        await self._computed(write)
        return path

    async def _computed(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, function)


class Host:
    """A LocalEngine with the newest weights of a folder, whole turns at a time: what an actor has
    said is said, and what it has not may be asked again, with the same answer.
    """

    def __init__(self, folder: Path, gpus_before: int, sizes: dict[str, Any]):
        torch.set_num_threads(1)
        path, gpus = max(folder.glob(VERSION)), torch.cuda.device_count()
        device = f"cuda:{min(gpus_before, gpus - 1)}" if gpus else "cpu"
        compute = ThreadPoolExecutor(1)
        self.engine = LocalEngine(load_decoder(path).to(device), compute=compute, **sizes)
        self.engine.version = int(path.name)

    async def turn(self, session: str, ids: Sequence[int], sampling: Sampling) -> list[Sampled]:
        return [sampled async for sampled in self.engine.generate(session, ids, sampling)]

    async def release(self, session: str) -> None:
        await self.engine.release(session)

    async def take(self, path: Path, version: int) -> int:
        """Asked again after a start that found these weights, it has them."""
        decoder = self.engine.decoder
        if self.engine.version != version:
            await self.engine.update(
                lambda: decoder.load_state_dict(load_decoder(path).state_dict())
            )
        return os.getpid()


class HostedEngine(CopiedEngine):
    """Made by `serve_copy`."""

    ask: Callable[..., Awaitable[Any]]  # a method of the Host
    process = 0

    async def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]:
        for sampled in await self.ask("turn", session, list(ids), sampling):
            self.generated += 1
            yield sampled

    async def release(self, session: str) -> None:
        await self.ask("release", session)

    async def take(self, path: Path, version: int) -> None:
        process = await self.ask("take", path, version)
        if self.process not in (0, process):
            log.warning("the engine had died; process %d has version %d", process, version)
        self.process = process


@asynccontextmanager
async def serve_copy(
    worker: Worker, folder: Path, *, on_ray: bool, slots: int, max_context: int, bf16: bool,
    version: int, compute: ThreadPoolExecutor,
) -> AsyncIterator[HostedEngine]:  # fmt: skip
    """The embedded engine over a copy of the worker's weights, for the time of the block."""
    engine = HostedEngine(
        worker=worker, folder=folder, max_context=max_context, version=version, half=False,
        compute=compute, tolerance=0.2 if bf16 else 2e-3,
    )  # fmt: skip
    path = await engine.publish(version)
    sizes = {"slots": slots + 1, "max_context": max_context, "bf16": bf16}  # one for the probe
    if on_ray:
        engine.ask = actor(Host, engine.folder, 0, sizes)
    else:
        host = Host(engine.folder, worker.ranks, sizes)
        engine.ask = lambda method, *args: getattr(host, method)(*args)
    await engine.take(path, version)
    await engine.probe()
    yield engine
