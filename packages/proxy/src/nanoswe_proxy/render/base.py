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
    """One tool call as the model wrote it; `arguments` is canonical JSON text of an object.

    `id` is the model's own, in families that sample one; what an agent sees is minted elsewhere.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Delta:
    """What one more piece of a generation adds to the message.

    kind: content, reasoning, call_name or call_args; `index` counts the calls, and is 0 otherwise.
    """

    kind: str
    index: int
    text: str


class Span(NamedTuple):
    """Ids `start` to `end` of a generation are its content, reasoning, call or end."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Parsed:
    """A generation as a message. status: text, calls, or malformed (such calls are in `content`).

    `spans` are in order and cover the generation.
    """

    content: str
    calls: tuple[Call, ...]
    status: str
    reasoning: str = ""
    spans: tuple[Span, ...] = ()


class Reader(Protocol):
    """Reads one generation while it is sampled."""

    parsed: Parsed  # after `end`

    def feed(self, ids: Sequence[int]) -> list[Delta]: ...

    def end(self, truncated: bool) -> list[Delta]: ...


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
        self,
        messages: Sequence[Message],
        last: Sequence[int],
        replay: Mapping[int, Sequence[int]],
        history: Sequence[Message] = (),
        tools: Sequence[dict] | None = None,
    ) -> Encoded:
        """What follows the generation whose sampled ids are `last`.

        The closing scaffold (synthetic if the end was not sampled), messages, generation prompt.
        `history` is what comes before `messages`, as it was served; its last message is the reply
        that `last` spells. Raises Unextendable where the template would now write what came before
        otherwise: the caller starts a root instead, with that reason.
        """
        ...

    def reader(self, tools: Sequence[dict] | None = None) -> Reader:
        """A reader for one generation. `tools` tell the types of arguments written as bare text."""
        ...

    def parse(
        self, ids: Sequence[int], truncated: bool, tools: Sequence[dict] | None = None
    ) -> Parsed:
        """The message that sampled ids spell: the fold of a reader."""
        ...

    def render_messages(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> list[Encoded]:
        """A finished conversation for SFT: stretches of context and of would-be-sampled ids, in
        order.
        """
        ...
