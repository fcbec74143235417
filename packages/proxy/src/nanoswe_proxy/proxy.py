"""Proxy: live sessions over one engine and one renderer; what the HTTP shell and an in-process
trainer call.

In: capabilities and request bodies. Out: replies, and Trajectories when sealed. A call runs in its
own task, so a client that goes away loses nothing: the same body sent again meets the running or
finished call (retry by delivery evidence). Refuses unknown capabilities (404), sealed sessions
(409).
"""

import asyncio
import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from nanoswe_proxy.dialects import chat
from nanoswe_proxy.engine.base import Engine, Sampled
from nanoswe_proxy.errors import EngineError, ProxyError, SealedError, UnknownSession
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.session import Prepared, Session
from nanoswe_proxy.state import Policy
from nanoswe_proxy.trajectory import Trajectory

KEPT_SEALED = 256  # trajectories kept so that a repeated seal gets the same answer


@dataclass(frozen=True)
class SamplingDefaults:
    """What a session samples with unless `open` says otherwise."""

    temperature: float = 1.0
    max_tokens: int = 512


@dataclass(eq=False)
class Exchange:
    """One call in flight or answered, apart from the socket that asked for it."""

    digest: bytes
    call: Prepared
    task: "asyncio.Task[bytes]"


@dataclass
class _Live:
    session: Session
    running: set["asyncio.Task[bytes]"] = field(default_factory=set)
    orphans: dict[bytes, Exchange] = field(default_factory=dict)  # nobody received these


class Proxy:
    """Sessions by capability. Use it on one event loop."""

    def __init__(
        self, engine: Engine, renderer: Renderer, sampling_defaults: SamplingDefaults | None = None
    ) -> None:
        self.engine, self.renderer = engine, renderer
        self.defaults = sampling_defaults or SamplingDefaults()
        self.root_url = ""
        self.counts: Counter[str] = Counter()
        self._live: dict[str, _Live] = {}
        self._sealed: OrderedDict[str, Trajectory] = OrderedDict()

    @property
    def open_sessions(self) -> int:
        return len(self._live)

    def open(self, trial_id: str, try_: int = 0, **fixed: Any) -> str:
        """A new session; its capability. `fixed` are fields of `state.Policy`."""
        cap = secrets.token_urlsafe(18)
        facts = {"seed_key": f"{trial_id}/{try_}", **asdict(self.defaults)}
        facts |= {k: v for k, v in fixed.items() if v is not None}
        policy = Policy(trial_id, try_, **facts)
        session = Session.open(cap, policy, self.renderer, self.engine.max_context)
        self._live[cap] = _Live(session)
        self.counts["sessions"] += 1
        return cap

    def base_url(self, cap: str) -> str:
        """What an agent takes as its OpenAI base URL."""
        return f"{self.root_url}/s/{cap}/v1"

    async def seal(self, cap: str) -> Trajectory:
        """End the session: calls in flight are cancelled and masked. Repeating it gives the same
        Trajectory.
        """
        if cap in self._sealed:
            return self._sealed[cap]
        live = self.live(cap)
        trajectory = live.session.seal()
        self._sealed[cap] = trajectory
        del self._live[cap]
        if len(self._sealed) > KEPT_SEALED:
            self._sealed.popitem(last=False)
        running = list(live.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.engine.release(cap)
        return trajectory

    def live(self, cap: str) -> _Live:
        """The open session of a capability."""
        if cap in self._live:
            return self._live[cap]
        if cap in self._sealed:
            raise SealedError("the session is sealed")
        raise UnknownSession("no session has this capability")

    def chat(self, cap: str, raw: bytes) -> Exchange:
        """Start a call, or meet the one that the same body started and nobody received."""
        live = self.live(cap)
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        orphan = live.orphans.pop(digest, None)
        if orphan and not (orphan.task.done() and orphan.task.exception()):
            self.counts["replayed"] += 1
            return orphan
        request = chat.parse(raw)
        call = live.session.prepare(request.messages, request.tools, request.requested)
        task = asyncio.create_task(self._generate(live.session, call, request.model))
        live.running.add(task)
        task.add_done_callback(live.running.discard)
        task.add_done_callback(_retrieve)
        self.counts["calls"] += 1
        self.counts["prompt_tokens"] += len(call.ids)
        self.counts["forks"] += bool(call.node.parent.fork and len(call.node.parent.children) == 1)
        return Exchange(digest, call, task)

    def delivered(self, cap: str, exchange: Exchange) -> None:
        """The transport took the whole reply."""
        if cap in self._live:
            self._live[cap].session.delivered(exchange.call)

    def undelivered(self, cap: str, exchange: Exchange) -> None:
        """The client went away first: keep the call for its retry."""
        if cap in self._live:
            self._live[cap].orphans[exchange.digest] = exchange
            self.counts["orphaned"] += 1

    async def _generate(self, session: Session, call: Prepared, model: str) -> bytes:
        stream = self.engine.generate(session.cap, call.ids, call.sampling)
        try:
            async with aclosing(cast(AsyncGenerator[Sampled, None], stream)) as tokens:
                async for sampled in tokens:
                    session.feed(call, sampled)
            message = session.commit(call)
            return chat.response(session.cap, model, call.node, message, len(call.ids))
        except asyncio.CancelledError as error:
            if session.sealed:
                raise SealedError("the session was sealed during the call") from error
            raise
        except ProxyError:
            raise
        except Exception as error:  # an engine may fail in any way; the agent gets a 502
            raise EngineError(f"{type(error).__name__}: {error}") from error
        finally:
            session.abort(call)  # nothing happens to a committed call
            self.counts["sampled_tokens"] += len(call.node.ids)


def _retrieve(task: "asyncio.Task[bytes]") -> None:
    """An orphan's failure is served to its retry, if there is one, and is no news to the event
    loop.
    """
    if not task.cancelled():
        task.exception()
