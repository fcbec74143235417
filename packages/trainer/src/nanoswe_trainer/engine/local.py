"""The embedded engine: token ids of a session in, sampled tokens with logprobs and version out, on
a CPU or a GPU.

Continuous batching over fixed slots. A session keeps its slot, and the keys and values of its
prefix, across turns until it is released; a prompt must extend what the slot holds, else the slot
is refilled from the point where they part. Every forward has one of two fixed shapes (prefill:
PREFILL_ROWS x PREFILL_WIDTH, decode: slots x 1) and the random number of a token is a hash of (seed
key, position), so what a session samples does not depend on who else is being served. Refuses: a
prompt that does not fit the context, an empty prompt. A session over the slot count waits for a
free one.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_trainer.model import Attend, Decoder

PREFILL_ROWS, PREFILL_WIDTH = 4, 32
GATHER_SEC = 0.006
T = TypeVar("T")
PATIENCE = 3  # decode steps that a prefill waits for company


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
    session: str = ""
    held: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    request: Request | None = None

    def pending(self) -> int:
        """Prompt tokens that are still to be prefilled; the last one is decoded, for its logits."""
        return len(self.request.ids) - 1 - len(self.held) if self.request else 0


class LocalEngine:
    """An `Engine` over a Decoder that `update` changes."""

    def __init__(self, decoder: Decoder, *, slots: int, max_context: int,
                 compute: ThreadPoolExecutor, bf16: bool = False):  # fmt: skip
        config = decoder.config
        self.decoder, self.max_context, self._compute = decoder, max_context, compute
        self.version, self.generated, self.prefilled = 0, 0, 0
        self._device, self._bf16 = next(decoder.parameters()).device, bf16
        # spare: a slot for the writes of unused prefill rows, and room for what is past the end
        self._room = max_context + PREFILL_WIDTH
        shape = (slots, config.num_key_value_heads, self._room, config.head_dim)
        self._keys, self._values = (
            torch.zeros(config.num_hidden_layers, shape[0] + 1, *shape[1:], device=self._device)
            for _ in range(2)
        )
        self._slots = [Slot() for _ in range(slots)]
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
        slot = self._by_session.get(session) or await self._take_slot(session)
        if slot.request:
            raise RuntimeError(f"session {session} already has a turn under way")
        shared = 0
        while shared < min(len(slot.held), len(ids) - 1) and slot.held[shared] == ids[shared]:
            shared += 1
        del slot.held[shared:]
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
            slot.session, slot.request, slot.held = "", None, []
            self._free.release()

    async def update(self, change: Callable[[], T]) -> T:
        """Change the weights between two steps. Turns under way go on: what they have sampled keeps
        its version, what follows has the next one, from keys and values computed afresh.
        """
        async with self._between_steps:
            done = await asyncio.get_running_loop().run_in_executor(self._compute, change)
            self.version += 1
            for slot in self._slots:
                slot.held = []
            return done

    async def _take_slot(self, session: str) -> Slot:
        await self._free.acquire()
        slot = next(s for s in self._slots if not s.session)
        slot.session = session
        self._by_session[session] = slot
        return slot

    def _ended(self, request: Request, token: int) -> bool:
        return (
            token in request.sampling.stop_ids
            or request.produced >= request.sampling.max_tokens
            or len(request.ids) >= self.max_context
        )

    async def _run(self) -> None:
        """Steps until nothing is under way: computing in the compute thread, bookkeeping here."""
        patience = 0
        while any(s.request for s in self._slots):
            # A step costs the same for one session as for all. While most are busy elsewhere (their
            # tools run), waiting a little fills it better and leaves the cores to them.
            under_way = sum(s.request is not None for s in self._slots)
            sessions = len(self._by_session)
            await asyncio.sleep(GATHER_SEC if under_way < sessions - under_way else 0)
            try:
                async with self._between_steps:
                    patience = await self._step(patience)
            except Exception as error:  # the engine's failure belongs to every turn under way
                for slot in self._slots:
                    if slot.request:
                        slot.request.out.put_nowait(error)
                        slot.request, slot.held = None, []

    async def _step(self, patience: int) -> int:
        """One prefill, if it is time for it, and one token for every turn whose prompt is in."""
        loop = asyncio.get_running_loop()
        filling = [i for i, s in enumerate(self._slots) if s.pending() > 0][:PREFILL_ROWS]
        ready = [i for i, s in enumerate(self._slots) if s.request and not s.pending()]
        requests = [self._slots[i].request for i in ready]
        patience = 0 if len(filling) == PREFILL_ROWS or not ready else patience - 1
        if filling and patience <= 0:
            patience = PATIENCE
            await loop.run_in_executor(self._compute, self._on_device, self._prefill, filling)
        if ready:
            drawn = await loop.run_in_executor(self._compute, self._on_device, self._decode, ready)
            for i, request, (token, logprob) in zip(ready, requests, drawn, strict=True):
                self._deliver(self._slots[i], request, token, logprob)
        return patience

    def _deliver(self, slot: Slot, request: Request | None, token: int, logprob: float) -> None:
        if request is None or slot.request is not request:
            return  # aborted while the step ran
        slot.held.append(request.ids[-1])
        request.ids.append(token)
        request.produced += 1
        self.generated += 1
        request.out.put_nowait(Sampled(token=token, logprob=logprob, version=self.version))
        if self._ended(request, token):
            slot.request = None

    def _attend(self, rows_B: Tensor, starts_B: Tensor, width: int) -> Attend:
        """Attention of `width` new tokens a row over the row's cache, which takes them in first."""
        config = self.decoder.config
        kv = config.num_key_value_heads
        repeat = config.num_attention_heads // kv
        count, at_BW = len(rows_B), starts_B[:, None] + torch.arange(width)
        # decoding serves the slots in order: a slice is a view, an index would copy the whole cache
        rows = slice(count) if width == 1 else rows_B
        mask = torch.arange(self._room) <= at_BW[:, :, None]  # (B, W, context)
        mask = mask.repeat(1, repeat, 1)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[rows_B[:, None], :, at_BW] = k.view(count, width, kv, -1).to(keys.dtype)
            values[rows_B[:, None], :, at_BW] = v.view(count, width, kv, -1).to(values.dtype)
            # grouped queries become extra rows of their key head, so keys are never repeated
            q = q.view(count, width, kv, repeat, -1).permute(0, 2, 3, 1, 4)
            scores = q.reshape(count, kv, repeat * width, -1) @ keys[rows].transpose(-1, -2)
            scores = (scores * config.head_dim**-0.5).masked_fill(~mask, float("-inf"))
            out = scores.softmax(-1) @ values[rows]
            return out.view(count, kv, repeat, width, -1).permute(0, 3, 1, 2, 4).flatten(0, 1)

        return attend

    def _on_device(self, act: Callable[[list[int]], T], slots: list[int]) -> T:
        half = torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)
        with torch.inference_mode(), self._device, half:
            return act(slots)

    def _prefill(self, filling: list[int]) -> None:
        ids = torch.zeros(PREFILL_ROWS, PREFILL_WIDTH, dtype=torch.long)
        rows = torch.full((PREFILL_ROWS,), len(self._slots))
        starts = torch.zeros(PREFILL_ROWS, dtype=torch.long)
        counts = []
        for row, index in enumerate(filling):
            slot = self._slots[index]
            if not slot.request:  # aborted since it was chosen
                counts.append(0)
                continue
            start = len(slot.held)
            chunk = slot.request.ids[start : min(start + PREFILL_WIDTH, len(slot.request.ids) - 1)]
            ids[row, : len(chunk)] = torch.tensor(chunk)
            rows[row], starts[row] = index, start
            counts.append(len(chunk))
        positions = (starts[:, None] + torch.arange(PREFILL_WIDTH)).flatten()
        self.decoder(ids.flatten(), positions, self._attend(rows, starts, PREFILL_WIDTH))
        for index, count in zip(filling, counts, strict=True):
            slot = self._slots[index]
            if slot.request and count:
                slot.held += slot.request.ids[len(slot.held) : len(slot.held) + count]
                self.prefilled += count

    def _decode(self, ready: list[int]) -> list[tuple[int, float]]:
        count = len(self._slots)
        ids, starts = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
        temperatures = torch.ones(count)
        requests = [self._slots[i].request for i in ready]
        for i, request in zip(ready, requests, strict=True):
            if request:
                ids[i], starts[i] = request.ids[-1], len(request.ids) - 1
                temperatures[i] = request.sampling.temperature or 1.0
        # an idle slot's dummy token goes to the end of its cache, where nothing is kept
        idle = torch.ones(count, dtype=torch.bool)
        idle[ready] = False
        starts[idle] = self.max_context - 1
        hidden = self.decoder(ids, starts, self._attend(torch.arange(count), starts, 1))
        logprobs = torch.log_softmax(self.decoder.head(hidden).float() / temperatures[:, None], -1)
        cumulative = logprobs.double().exp().cumsum(-1)
        drawn = []
        for i, request in zip(ready, requests, strict=True):
            if not request:
                drawn.append((0, 0.0))
                continue
            if request.sampling.temperature == 0:
                token = int(logprobs[i].argmax())
            else:
                u = uniform(request.sampling.seed_key, len(request.ids)) * cumulative[i, -1]
                token = int(torch.searchsorted(cumulative[i], u, right=True))
                token = min(token, logprobs.shape[1] - 1)
            drawn.append((token, float(logprobs[i, token])))
        return drawn
