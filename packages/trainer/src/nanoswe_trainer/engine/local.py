"""The embedded engine: token ids of a session in, sampled tokens with logprobs and version out, on
a CPU or a GPU.

Continuous batching over fixed slots. A session keeps its slot, and the keys and values of its
prefix, across turns until it is released; a prompt must extend what the slot holds, else the slot
is refilled from the point where they part. A first prompt's chunks are copied from whoever has the
same: attempts at a task prefill it once. What a session samples does not depend on who else is
served: cache.py sees to that, and a token's random number is a hash of (seed key, position).
Refuses: a prompt that does not fit the context, an empty prompt. A session over the slot count
waits for a free one.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_trainer.engine.cache import CHUNK, MOST_CHUNKS, Cache, Piece
from nanoswe_trainer.model import Decoder

GATHER_SEC = 0.006
T = TypeVar("T")


def uniform(seed_key: str, position: int) -> float:
    """The random number in [0, 1) that decides the token at `position`."""
    digest = hashlib.blake2b(f"{seed_key}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass
class Request:
    """One turn under way in a slot."""

    ids: list[int]
    sampling: Sampling
    out: "asyncio.Queue[Sampled | BaseException]"
    produced: int = 0


@dataclass
class Slot:
    index: int
    session: str = ""
    held: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    shared: int = 0  # so many of them, in chunks from 0 on, another slot may copy
    request: Request | None = None

    def cut(self, held: int) -> None:
        del self.held[held:]
        self.shared = min(self.shared, held - held % CHUNK)

    def pending(self) -> int:
        """Prompt tokens that are still to be prefilled; the last one is decoded, for its logits."""
        return len(self.request.ids) - 1 - len(self.held) if self.request else 0


class LocalEngine:
    """An `Engine` over a Decoder that `update` changes."""

    def __init__(self, decoder: Decoder, *, slots: int, max_context: int,
                 compute: ThreadPoolExecutor, bf16: bool = False):  # fmt: skip
        self.decoder, self.max_context, self._compute = decoder, max_context, compute
        self.version, self.generated = 0, 0
        self._cache = Cache(decoder, slots, max_context, bf16)
        self._slots = [Slot(index) for index in range(slots)]
        self._by_session: dict[str, Slot] = {}
        self._free = asyncio.Semaphore(slots)
        self._runner: asyncio.Task[None] | None = None
        self._between_steps = asyncio.Lock()

    async def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]:
        """Yield tokens until a stop id (included) or max_tokens."""
        if not 0 < len(ids) < self.max_context:
            text = f"a prompt of {len(ids)} tokens does not fit a context of {self.max_context}"
            raise ValueError(text)
        if session not in self._by_session:
            await self._free.acquire()
            slot = self._by_session[session] = next(s for s in self._slots if not s.session)
            slot.session = session
            slot.cut(0)
        slot = self._by_session[session]
        if slot.request:
            raise RuntimeError(f"session {session} already has a turn under way")
        kept = 0
        while kept < min(len(slot.held), len(ids) - 1) and slot.held[kept] == ids[kept]:
            kept += 1
        slot.cut(kept)
        request = slot.request = Request(list(ids), sampling, asyncio.Queue())
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            while True:
                item = await request.out.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if self._ended(request, item.token):
                    return
        finally:
            if slot.request is request:  # the caller went away in the middle
                slot.request = None

    async def release(self, session: str) -> None:
        """Give the session's slot back; a session that holds none is fine."""
        slot = self._by_session.pop(session, None)
        if slot:
            slot.session, slot.request = "", None  # what it holds may be copied until it is taken
            self._free.release()

    async def update(self, change: Callable[[], T]) -> T:
        """Change the weights between two steps. Turns under way go on: what they have sampled keeps
        its version, what follows has the next one, from keys and values computed afresh.
        """
        async with self._between_steps:
            done = await asyncio.get_running_loop().run_in_executor(self._compute, change)
            self.version += 1
            for slot in self._slots:
                slot.cut(0)
            return done

    def _ended(self, request: Request, token: int) -> bool:
        return (
            token in request.sampling.stop_ids
            or request.produced >= request.sampling.max_tokens
            or len(request.ids) >= self.max_context
        )

    async def _run(self) -> None:
        """Steps until nothing is under way: computing in the compute thread, bookkeeping here."""
        while any(s.request for s in self._slots):
            # While most sessions are busy elsewhere (their tools run), waiting a little fills a
            # step better and leaves the cores to them.
            under_way = sum(s.request is not None for s in self._slots)
            await asyncio.sleep(GATHER_SEC if 2 * under_way < len(self._by_session) else 0)
            try:
                async with self._between_steps:
                    await self._step()
            except Exception as error:  # the engine's failure belongs to every turn under way
                for slot in self._slots:
                    if slot.request:
                        slot.request.out.put_nowait(error)
                        slot.request = None
                    slot.cut(0)

    async def _step(self) -> None:
        """One token for every turn whose prompt is in; of other prompts a chunk each."""
        chunks, loop = self._chunks(), asyncio.get_running_loop()
        ready = [(s, r, len(r.ids)) for s in self._slots if (r := s.request) and not s.pending()]
        pieces = [(s.index, len(s.held), r.ids[len(s.held) : n]) for s, r, n in ready + chunks]
        dice = [(r.sampling.temperature, uniform(r.sampling.seed_key, n)) for _, r, n in ready]
        drawn = await loop.run_in_executor(self._compute, self._advance, pieces, dice)
        for i, (slot, request, end) in enumerate(ready + chunks):
            if slot.request is not request:
                continue  # aborted while the step ran
            if i >= len(ready) and slot.shared == len(slot.held):
                slot.shared = end
            slot.held = request.ids[:end]
            if i < len(ready):
                token, logprob = drawn[i]
                request.ids.append(token)
                request.produced += 1
                self.generated += 1
                request.out.put_nowait(Sampled(token, logprob, self.version))
                if self._ended(request, token):
                    slot.request = None

    def _chunks(self) -> list[tuple[Slot, Request, int]]:
        """What to prefill next, and up to where. A first prompt is copied from slots that have it,
        chunk by chunk; what another slot computes now, it waits for.
        """
        chunks: list[tuple[Slot, Request, int]] = []
        for slot in self._slots:
            while slot.request and slot.pending() > 0 and len(chunks) < MOST_CHUNKS:
                ids, start = slot.request.ids, len(slot.held)
                end = min(start + CHUNK, len(ids) - 1)
                wanted = ids[:end] if slot.shared == start else None
                having = (s for s in self._slots if s.shared >= end and s.held[:end] == wanted)
                if not (other := next(having, None)):
                    if wanted not in [request.ids[:n] for _, request, n in chunks]:
                        chunks.append((slot, slot.request, end))
                    break
                for cache in self._cache.pair:
                    cache[:, slot.index, :, start:end] = cache[:, other.index, :, start:end]
                slot.held, slot.shared = ids[:end], end
        return chunks

    def _advance(
        self, pieces: list[Piece], dice: list[tuple[float, float]]
    ) -> list[tuple[int, float]]:
        """Of the first pieces the next token and its logprob; `dice`: their temperature, chance."""
        if not pieces:
            return []
        table = torch.tensor(dice, dtype=torch.double, device=self._cache.device)
        heat, chance = table.view(-1, 2).T
        logits = self._cache.forward(pieces, len(dice))
        heats = torch.where(heat > 0, heat, 1.0).float()[:, None]
        logprobs = torch.log_softmax(logits / heats, -1)
        sums = logprobs.exp().double().cumsum(-1)
        drawn = torch.searchsorted(sums, (chance * sums[:, -1])[:, None], right=True)[:, 0]
        tokens = drawn.clamp(max=logprobs.shape[1] - 1).where(heat > 0, logprobs.argmax(-1))
        found = logprobs.gather(1, tokens[:, None])[:, 0]
        return [*zip(tokens.tolist(), found.tolist(), strict=True)]
