"""Calls apart from the sockets that asked for them; which of them a body that comes again meets.

In: the calls of one session. Out: the one whose reply a request with the same body is to get, or
none: it is sampled anew; and what a reply says, as it is sampled. Two clients that are both there
do not share a generation: without evidence only a client that says it tries again is believed, and
only where one call can be meant.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoswe_proxy.render.types import Delta
from nanoswe_proxy.session import Prepared

GRACE_SEC = 2.0
KEEP_ALIVE_SEC = 15.0


@dataclass(eq=False)
class Exchange:
    """One request in flight or answered."""

    calls: Sequence[Prepared]  # one for each choice
    digest: str  # of the request's body
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
        over = ("aborted", "acknowledged")
        return not failed and not any(c.node.delivery in over for c in self.calls)

    def in_doubt(self, connected: Callable[[Any], bool]) -> bool:
        """All of it was sent, nothing has followed, and the connection is gone: was it received?"""
        young = 0 < time.monotonic() - self.sent < GRACE_SEC
        followed = any(c.node.children for c in self.calls)
        return young and not (followed or connected(self.peer))


async def follow(exchange: Exchange, each: bool = True) -> AsyncIterator[list[tuple[Delta, int]]]:
    """What the reply says, and in which choice, `each` piece as it is sampled; nothing, now and
    then, while waiting. Ends only after the call is committed; raises what the call raised.
    """
    at, task = [0] * len(exchange.calls), exchange.task

    def fresh() -> list[tuple[Delta, int]]:
        told = [(d, i) for i, c in enumerate(exchange.calls) for d in c.deltas[at[i] :]]
        at[:] = (len(c.deltas) for c in exchange.calls)
        return told

    while task and not task.done():
        told = fresh()
        if not told:
            wanted = {task, exchange.moved} if each else {task}
            done, _ = await asyncio.wait(
                wanted, timeout=KEEP_ALIVE_SEC, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                continue
        yield told
    if task:
        task.result()
    yield fresh()


def meet(
    calls: Sequence[Exchange], digest: str, retry: bool, key: str, connected: Callable[[Any], bool]
) -> tuple[Exchange | None, bool]:
    """The one of `calls`, oldest first, that a request goes on with; and whether it is in doubt."""
    known = [e for e in calls if e.digest == digest and e.usable]
    sure = [e for e in known if key and e.key == key]
    sure += [e for e in known if e.lost and not (key and e.key)]
    sure += known if retry and not key and len(known) == 1 else []
    found = next(iter(sure), None) or next((e for e in known if e.in_doubt(connected)), None)
    return found, bool(found and not sure)
