"""Wire dialects: each turns a request body into wire-normal messages, and a reply, whole or as it
is sampled, into the bytes of its protocol.

A dialect is a module with `parse(raw) -> Request`, `Stream` (frames of a reply) and `error(...)`.
A reply that is not streamed is `Stream.whole` after the same deltas: the fold of the stream.
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from nanoswe_proxy.render.base import Delta
from nanoswe_proxy.tree import Generation


@dataclass(frozen=True)
class Request:
    """A call, wire-normal. `requested` holds the sampling values that the agent asked for."""

    messages: list[dict]
    tools: list[dict] | None
    requested: dict
    stream: bool
    usage: bool = True  # whether a stream ends with a count of tokens


@dataclass(frozen=True)
class Answer:
    """What a reply is made of, apart from its text."""

    cap: str
    node: Generation
    prompt_tokens: int
    request: Request

    @property
    def model(self) -> str:
        return str(self.request.requested.get("model", ""))


class Stream(Protocol):
    """The frames of one reply: `start`, then `delta` for each, then `end`, or `whole` instead."""

    def __init__(self, answer: Answer) -> None: ...

    def start(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self) -> bytes: ...

    def whole(self) -> dict: ...


def sse(data: Any, event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
