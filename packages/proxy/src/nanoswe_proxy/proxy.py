"""Proxy: live sessions over one engine and one renderer, for the HTTP shell and for trainers.

In: capabilities and requests. Out: replies as they are sampled, and Trajectories when sealed. A
call runs in its own task, so a client that goes away loses nothing: the same body sent again meets
the running or finished call (retry by delivery evidence), even after a crash if there is a log.
Refuses unknown capabilities (404) and sealed sessions (409).
"""

import asyncio
import hashlib
import json
import math
import os
import secrets
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from nanoswe_proxy import errors, export, tree
from nanoswe_proxy.dialects import Request
from nanoswe_proxy.engine.base import Engine, Pausable, Sampled
from nanoswe_proxy.exchange import Exchange, meet
from nanoswe_proxy.log import Log, read
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.session import Prepared, Session
from nanoswe_proxy.state import Policy, replay
from nanoswe_proxy.trajectory import Trajectory
from nanoswe_proxy.tree import Context, Place

KEPT_SEALED = 64  # trajectories kept without a log, so that a repeated seal gets the same answer
SHORT_TAIL = 2000  # characters and ids
DEFAULTS = {"temperature": 1.0, "max_tokens": 512}  # how a session samples if nothing else is said
POLICY = TypeAdapter(Policy)


@dataclass
class _Live:
    session: Session
    exchanges: list[Exchange] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: set["asyncio.Future[None]"] = field(default_factory=set)


class Proxy:
    """Sessions by capability. Use it on one event loop. With `logs`, a folder, they survive it."""

    def __init__(
        self, engine: Engine, renderer: Renderer, logs: Path | None = None, *,
        max_sessions: int = 10_000, max_calls: int = 1024, **defaults: float,
    ) -> None:  # fmt: skip
        self.engine, self.renderer, self.logs = engine, renderer, logs
        if max_sessions < 1 or max_calls < 1:
            raise errors.BadRequest("max_sessions and max_calls must be at least 1")
        self.max_sessions, self._slots = max_sessions, asyncio.Semaphore(max_calls)
        self.defaults = DEFAULTS | defaults
        self.root_url, self.prefix = "", ""  # capabilities begin with the latter
        self.counts: Counter[str] = Counter()
        self.connected: Callable[[Any], bool] = lambda peer: True
        self.on_seal: Callable[[Trajectory], None] = lambda trajectory: None
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        # Fewer than there are processors: the loop's thread always has one.
        self._encoders = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1))
        self._live: dict[str, _Live] = {}
        self._sealed: OrderedDict[str, Trajectory] = OrderedDict()
        for path in sorted(logs.glob("*.log")) if logs else ():
            found = read(path)
            if found.records and found.records[-1][0]["type"] != "seal":
                session = Session.resume(found.records, renderer, Log(path, found))
                calls = session.unreceived()
                lost = [Exchange(c, c[0].node.digest, lost=True) for c in calls]
                self._live[session.cap] = _Live(session, lost)
                self.counts["recovered"] += 1

    def rank(self, cap: str) -> int:  # 0: an open session's, 1: a sealed one's, 2: unknown
        path = self._path(cap)
        sealed = cap in self._sealed or (path and path.exists())
        return 0 if cap in self._live else 1 if sealed else 2

    def open(self, trial_id: str, /, try_: int = 0, **fixed: Any) -> str:
        """A new session; its capability. `fixed` are other fields of `state.Policy`."""
        if len(self._live) >= self.max_sessions:
            many = f"{len(self._live)} sessions are open"
            raise errors.ProxyError(many, 503, "too_many_sessions")
        cap = self.prefix + secrets.token_urlsafe(18)
        facts = {"trial_id": trial_id, "try_": try_, "seed_key": f"{trial_id}/{try_}"}
        facts |= self.defaults | {k: v for k, v in fixed.items() if v is not None}
        try:
            policy, path = POLICY.validate_json(json.dumps(facts), strict=True), self._path(cap)
        except ValidationError as error:
            wrong = error.errors()[0]
            what = f"{wrong['loc'][0]} = {wrong['input']!r}: {wrong['msg']}"
            raise errors.BadRequest(what) from error
        log = Log(path) if path else None
        session = Session.open(cap, policy, self.renderer, self.engine.max_context, log)
        self._live[cap] = _Live(session)
        self.counts["sessions"] += 1
        return cap

    def base_url(self, cap: str) -> str:
        """What an agent takes as its OpenAI base URL."""
        return f"{self.root_url}/s/{cap}/v1"

    async def seal(self, cap: str) -> Trajectory:
        """End the session, cancel and mask what is in flight. Again: the same Trajectory."""
        path = self._path(cap)
        if cap in self._sealed:
            return self._sealed[cap]
        if cap not in self._live and path and path.exists():
            return export.trajectory(replay(read(path).records))
        live = self.live(cap)
        trajectory = live.session.seal()
        self.on_seal(trajectory)  # where it fails, whoever seals again gets here again
        del self._live[cap]
        if not path:
            self._sealed[cap] = trajectory
            if len(self._sealed) > KEPT_SEALED:
                self._sealed.popitem(last=False)
        await asyncio.sleep(0)  # each has begun, and can say why it ends
        for task in live.running:
            task.cancel()
        await asyncio.gather(*live.running, return_exceptions=True)
        await self.engine.release(cap)
        return trajectory

    async def pause(self) -> dict:
        """New calls wait; an engine that can be paused cuts off those in flight until `resume`."""
        self.open_gate.clear()
        try:
            if isinstance(self.engine, Pausable):
                await self.engine.pause()
        except BaseException:
            self.open_gate.set()
            raise
        return {"paused": True}

    async def resume(self, version: Any) -> dict:
        """From here on the weights are those of `version`."""
        if type(version) is not int or version < 0:
            raise errors.BadRequest(f"version = {version!r}: it must be a number from 0 on")
        if isinstance(self.engine, Pausable):
            await self.engine.resume(version)
        elif version != self.engine.version:
            own = self.engine.version
            raise errors.BadRequest(f"the engine's own version is {own}, not {version}")
        self.open_gate.set()
        return {"paused": False, "version": version}

    def live(self, cap: str) -> _Live:
        """The open session of a capability."""
        if cap in self._live:
            return self._live[cap]
        if self.rank(cap) == 1:
            raise errors.SealedError("the session is sealed")
        named, dash, _ = cap.partition("-")
        if self.prefix and named[1:].isdecimal() and named + dash != self.prefix:
            other = f"this is worker {self.prefix[:-1]}: ask the session's own, {named[:20]}"
            raise errors.ProxyError(other, 421, "wrong_worker")
        raise errors.ProxyError("no session has this capability", 404, "unknown_session")

    async def call(
        self, cap: str, raw: bytes, request: Request, *, retry: bool = False, key: str = "",
        peer: Any = None,
    ) -> Exchange:  # fmt: skip
        """Start a call, or meet the one that the same body started and nobody received; `retry`
        and `key` are what the client says of that. Calls are placed in the order of their coming.
        """
        live, loop = self.live(cap), asyncio.get_running_loop()
        session, messages = live.session, request.messages
        kind = b"completion" if request.prompts else b""
        digest = hashlib.blake2b(raw, digest_size=16, person=kind).hexdigest()
        known, doubt = meet(live.exchanges, digest, retry, key, self.connected)
        if known:
            known.lost, known.peer = False, peer
            known.sent = math.inf if doubt else known.sent
            self.counts["replayed"] += 1
            if doubt:
                node, noted = known.calls[0].node.index, session.notes.get("replayed_in_doubt", ())
                session.annotate({"replayed_in_doubt": [*noted, node]})
            return known
        async with live.lock:
            if request.prompts:
                level, drafts = 0, (session.raw(p) for p in request.prompts)
                contexts = await loop.run_in_executor(self._encoders, list, drafts)
            else:
                place = session.locate(messages, request.tools)
                level, contexts = place.level, [await self._draft(session, place, request)]
            about = (len(messages), request.requested, digest, request.n)
            calls = session.admit(contexts, level, *about)
        exchange = Exchange(calls, digest, loop.create_future(), key=key, peer=peer)
        exchange.task = task = asyncio.create_task(self._generate(session, exchange))
        live.running.add(task)
        task.add_done_callback(live.running.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # no news to the loop
        live.exchanges = [*(e for e in live.exchanges if e.usable), exchange]
        context, size = calls[0].node.parent, sum(c.size for c in calls[:: request.n])
        fork = context.fork if len(context.children) == request.n else ""
        more = {"calls": len(calls), "prompt_tokens": size, f'matched{{level="{level}"}}': 1}
        self.counts.update(more | ({f'forks{{reason="{fork}"}}': 1} if fork else {}))
        return exchange

    async def count(self, cap: str, request: Request) -> int:
        """The tokens that the request's prompt would have."""
        session = self.live(cap).session
        place = session.locate(request.messages, request.tools)
        return len(tree.prompt(await self._draft(session, place, request)))

    def delivered(self, cap: str, exchange: Exchange, peer: Any = None) -> None:
        """The transport took the whole reply."""
        if exchange.peer == peer:  # else it went to a client that has tried again since
            exchange.sent = exchange.sent or time.monotonic()
            for call in exchange.calls if cap in self._live else ():
                self._live[cap].session.delivered(call)

    def undelivered(self, cap: str, exchange: Exchange, begun: bool, peer: Any = None) -> None:
        """The client went away: keep the call for its retry; stop it, if its reply has `begun`."""
        if exchange.peer == peer:
            exchange.lost = True
            self.counts["orphaned"] += cap in self._live
            if begun and exchange.task and exchange.task.cancel():
                self.counts["aborted"] += 1

    def health(self) -> dict:
        return {"status": "ok", "version": self.engine.version, "open_sessions": len(self._live)}

    def metrics(self) -> str:
        series = ((*k.partition("{"), v) for k, v in sorted(self.counts.copy().items()))
        lines = [f"nanoswe_proxy_{name}_total{a}{b} {v}" for name, a, b, v in series]
        return "\n".join([*lines, f"nanoswe_proxy_open_sessions {len(self._live)}\n"])

    async def _draft(self, session: Session, place: Place, request: Request) -> Context:
        """A short tail is encoded at once: the way to a thread and back would take longer."""
        if place.context:
            return place.context
        told = sum(len(m["content"]) for m in place.rest)
        replies = any(m["role"] == "assistant" for m in place.rest)
        if place.parent and not replies and told + len(place.parent.ids) < SHORT_TAIL:
            with suppress(errors.Unextendable):
                return session.draft(place, request.messages, whole=False)
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._encoders, session.draft, place, request.messages)

    async def _generate(self, session: Session, exchange: Exchange) -> None:
        """All choices, or none: where one fails, those that still run are cut off."""
        try:
            if len(exchange.calls) == 1:
                await self._sample(session, exchange, exchange.calls[0])
                return
            async with asyncio.TaskGroup() as group:
                for call in exchange.calls:
                    group.create_task(self._sample(session, exchange, call))
        except asyncio.CancelledError as error:
            if session.sealed:
                raise errors.SealedError("the session was sealed during the call") from error
            raise
        except Exception as error:  # an engine may fail in any way; the agent gets a 502
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            known = isinstance(first, errors.ProxyError)
            raise first if known else errors.EngineError(repr(first)) from error
        finally:
            exchange.calls = [replace(c, ids=array("I")) for c in exchange.calls]  # the tree has it

    async def _sample(self, session: Session, exchange: Exchange, call: Prepared) -> None:
        try:
            stream = self.engine.generate(session.cap, call.ids, call.sampling)
            tokens = cast(AsyncGenerator[Sampled, None], stream)
            async with self._slots, aclosing(tokens):  # too many calls wait; nobody is told 429
                await self.open_gate.wait()
                async for sampled in tokens:
                    more = session.feed(call, sampled)
                    exchange.moved.set_result(None)
                    exchange.moved = asyncio.get_running_loop().create_future()
                    if not more:
                        break
            session.commit(call)
        finally:
            session.abort(call)  # nothing happens to a committed call
            self.counts["sampled_tokens"] += len(call.node.ids)

    def _path(self, cap: str) -> Path | None:
        """A log is named by its capability's hash: a name gives nobody access."""
        name = hashlib.blake2s(cap.encode(errors="replace"), digest_size=12).hexdigest()
        return self.logs / f"{name}.log" if self.logs else None
