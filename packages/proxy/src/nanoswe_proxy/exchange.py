"""Calls apart from the sockets that asked for them; which of them a body that comes again meets.

In: the calls of one session. Out: the one whose reply a request with the same body is to get, or
none: it is sampled anew. Two clients that are both there do not share a generation: without
evidence only a client that says it tries again is believed, and only where one call can be meant.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoswe_proxy.session import Prepared

GRACE_SEC = 2.0


@dataclass(eq=False)
class Exchange:
    """One call in flight or answered."""

    call: Prepared
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
        return not failed and self.call.node.delivery not in ("aborted", "acknowledged")

    def in_doubt(self, connected: Callable[[Any], bool]) -> bool:
        """All of it was sent, nothing has followed, and the connection is gone: was it received?"""
        young = 0 < time.monotonic() - self.sent < GRACE_SEC
        return young and not (self.call.node.children or connected(self.peer))


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
