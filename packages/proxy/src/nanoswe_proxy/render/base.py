"""The Renderer protocol and the message form that renderers read.

In: wire-normal messages (`wire.normalise`). Out: ids with one provenance letter per id.
A renderer only ever extends: ids that were sampled come back to it as ids, never as text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Message = Mapping[str, Any]  # role, content: str, calls: [{name, arguments: str, id}], call_id


class Encoded(NamedTuple):
    """Ids and their provenance letters, of equal length."""

    ids: tuple[int, ...]
    provenance: str


@dataclass(frozen=True)
class Call:
    """One tool call as the model wrote it; `arguments` is canonical JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """A generation as a message. status: text, calls, or malformed (then everything is content)."""

    content: str
    calls: tuple[Call, ...]
    status: str


class Renderer(Protocol):
    """One template family over one tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def root(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict] | None,
        replay: Mapping[int, Sequence[int]],
    ) -> Encoded:
        """A whole history from nothing, generation prompt included.

        `replay` gives the sampled ids of assistant messages by their index.
        """
        ...

    def tail(
        self, messages: Sequence[Message], last: Sequence[int], replay: Mapping[int, Sequence[int]]
    ) -> Encoded:
        """What follows the generation whose sampled ids are `last`.

        The closing scaffold (synthetic if the end was not sampled), messages, generation prompt.
        """
        ...

    def parse(self, ids: Sequence[int], truncated: bool) -> Parsed:
        """The message that sampled ids spell."""
        ...

    def render_messages(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> list[Encoded]:
        """A finished conversation for SFT: stretches of context and of would-be-sampled ids, in
        order.
        """
        ...
