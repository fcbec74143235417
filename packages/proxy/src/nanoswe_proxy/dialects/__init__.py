"""Wire dialects: each turns a request body into wire-normal messages, and a reply, whole or as it
is sampled, into the bytes of its protocol.

A dialect is a module with `parse(raw) -> Request`, `Stream` (the frames of a reply) and, unless
errors look as OpenAI's do, `error`.
A reply that is not streamed is `Stream.whole` after the same deltas: the fold of the stream.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoswe_proxy.errors import ProxyError
from nanoswe_proxy.render.types import Delta
from nanoswe_proxy.session import Prepared
from nanoswe_proxy.tree import echo_id

# Whole replies as they begin.
SHAPES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Request:
    """A call, wire-normal. `requested` holds the sampling values that the agent asked for."""

    messages: list[dict]
    tools: list[dict] | None
    requested: dict
    stream: bool
    usage: bool  # whether a stream ends with a count of tokens, where its dialect asks
    n: int  # replies wanted, to each prompt
    prompts: Sequence[str | list[int]] = ()  # of a completion: it has no messages


class Stream:
    """The frames of one reply: `start`, `delta` for each piece, `end`; `whole` is their fold.

    A reply is blocks, each of one kind; a dialect says how one opens, grows and closes.
    """

    kinds: Mapping[str, str]  # the dialect's names for kinds of deltas
    start: Callable[[], bytes]
    end: Callable[[], bytes]
    whole: Callable[[], dict]
    _open: Callable[[str, Delta], bytes]
    _grow: Callable[[dict[str, Any], str], bytes]
    _close: Callable[[], bytes]

    def __init__(self, request: Request, cap: str, calls: Sequence[Prepared]) -> None:
        self.request, self.cap, self.calls = request, cap, calls
        self.prompt_tokens = sum(call.size for call in calls[:: request.n])
        self.node, self.model = calls[0].node, str(request.requested.get("model", ""))
        self.blocks: list[dict[str, Any]] = []

    def delta(self, delta: Delta, choice: int = 0) -> bytes:
        kind, frames, begins = self.kinds[delta.kind], b"", delta.kind == "call_name"
        if begins or not self.blocks or self.blocks[-1]["type"] != kind:
            frames = self._close() + self._open(kind, delta)
        return frames + (b"" if begins else self._grow(self.blocks[-1], delta.text))

    def fail(self, error: ProxyError) -> bytes:
        """An error in the middle of a stream."""
        return sse(error.body())

    def sse(self, data: Any, event: str = "") -> bytes:
        """A frame, where frames are sent at all."""
        return sse(data, event) if self.request.stream else b""

    def ours(self, prefix: str, call: int = 0, choice: int = 0) -> str:
        """An id that tells whose reply it is when it comes back."""
        return echo_id(self.cap, self.calls[choice].node.index, call, prefix)


def sse(data: Any, event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
