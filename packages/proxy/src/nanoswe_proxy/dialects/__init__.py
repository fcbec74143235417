"""Wire dialects: each turns a request body into wire-normal messages, and a reply, whole or as it
is sampled, into the bytes of its protocol.

A dialect is a module with `parse(raw) -> Request`, `Stream` (the frames of a reply) and, unless
errors look as OpenAI's do, `error`.
A reply that is not streamed is `Stream.whole` after the same deltas: the fold of the stream.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoswe_proxy.errors import ProxyError
from nanoswe_proxy.render.types import Delta
from nanoswe_proxy.session import Prepared
from nanoswe_proxy.tree import echo_id


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
    """The frames of one reply: `start`, `delta` for each piece, `end`; `whole` is their fold."""

    start: Callable[[], bytes]
    delta: Callable[[Delta, int], bytes]
    end: Callable[[], bytes]
    whole: Callable[[], dict]

    def __init__(self, request: Request, cap: str, calls: Sequence[Prepared]) -> None:
        self.request, self.cap, self.calls = request, cap, calls
        self.prompt_tokens = sum(call.size for call in calls[:: request.n])
        self.told = [0] * len(calls)  # tokens whose logprobs are told
        self.node, self.model = calls[0].node, str(request.requested.get("model", ""))

    def fail(self, error: ProxyError) -> bytes:
        """An error in the middle of a stream."""
        return sse(error.body())

    def ours(self, prefix: str, call: int = 0, choice: int = 0) -> str:
        """An id that tells whose reply it is when it comes back."""
        return echo_id(self.cap, self.calls[choice].node.index, call, prefix)


def sse(data: Any, event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
