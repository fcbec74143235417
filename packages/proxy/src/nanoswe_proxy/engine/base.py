"""The Engine protocol: token ids in, a stream of (token, logprob, version) out.

An engine never sees text. It stops after a stop id (which it yields) or after `max_tokens`.
It must not emit a token that it does not want recorded: every yielded token is in the trajectory.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one generation is sampled. Sampling is counter-based: keyed by (seed_key, position)."""

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed_key: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, its logprob under the sampling distribution, and the weights' version."""

    token: int
    logprob: float
    version: int


class Engine(Protocol):
    """Anything that continues token ids: the trainer's model, an inference server, a script."""

    @property
    def version(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]: ...

    async def release(self, session: str) -> None:
        """The session is sealed: its KV cache may go."""
        ...


@runtime_checkable
class Pausable(Protocol):
    """An engine whose weights are changed from outside, between `pause` and `resume`."""

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...
