"""Calls apart from the sockets that asked for them; which of them a body that comes again meets.

In: the calls of one session by the digest of their body. Out: the call whose reply a request is to
get, or none: it is sampled anew. Two clients that are both there do not share a generation: without
evidence only a client that says it tries again is believed, and only where one call can be meant.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nanoswe_proxy.session import Prepared

GRACE_SEC = 2.0


@dataclass(eq=False)
class Exchange:
    """One call in flight or answered."""

    call: Prepared
    moved: Any = None  # a future: done, and replaced, when there are more ids
    task: "asyncio.Future[None] | None" = None
    key: str = ""  # the client's Idempotency-Key
    peer: Any = None  # whose connection it came by last
    lost: bool = False  # whoever asked went away before the last byte
    sent: float = 0.0  # when the transport had taken all of it; inf: that is not in doubt

    @property
    def usable(self) -> bool:
        """Whether it has, or may yet have, an answer that nobody is known to have."""
        failed = self.task and self.task.done() and (self.task.cancelled() or self.task.exception())
        return not failed and self.call.node.delivery not in ("aborted", "acknowledged")

    def in_doubt(self, connected: Callable[[Any], bool]) -> bool:
        """All of it was sent, nothing has followed, and the connection is gone: was it received?"""
        young = 0 < time.monotonic() - self.sent < GRACE_SEC
        return young and not (self.call.node.children or connected(self.peer))


class Exchanges:
    """The calls of one session that may be asked for again, oldest first for each digest."""

    def __init__(self, unreceived: Iterable[Prepared] = ()) -> None:
        """`unreceived`: committed before a crash."""
        self._of: dict[str, list[Exchange]] = {}
        for call in unreceived:
            self._of.setdefault(call.node.digest, []).append(Exchange(call, lost=True))

    def add(self, digest: str, exchange: Exchange) -> None:
        kept = {d: [e for e in old if e.usable] for d, old in self._of.items()}
        self._of = {d: old for d, old in kept.items() if old}
        self._of.setdefault(digest, []).append(exchange)

    def meet(
        self, digest: str, retry: bool, key: str, peer: Any, connected: Callable[[Any], bool]
    ) -> tuple[Exchange | None, bool]:
        """The call that such a request goes on with; and whether that is in doubt."""
        known = [e for e in self._of.get(digest, ()) if e.usable]
        sure = [e for e in known if key and e.key == key]
        sure += [e for e in known if e.lost and not (key and e.key)]
        sure += known if retry and not key and len(known) == 1 else []
        found = next(iter(sure), None) or next((e for e in known if e.in_doubt(connected)), None)
        if found:
            found.lost, found.peer = False, peer
            found.sent = found.sent if sure else math.inf
        return found, bool(found and not sure)
