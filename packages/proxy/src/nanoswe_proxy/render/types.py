"""What goes between renderers, readers and the session.

Ids with one provenance letter per id; replies as deltas and as a whole. Messages are wire-normal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = Mapping[str, Any]  # role, content: str, calls: [{name, arguments: str, id}], call_id
Messages = Sequence[Message]
Tools = Sequence[dict] | None
Replay = Mapping[int, Sequence[int]]  # the sampled ids of assistant messages, by index


class Encoded(NamedTuple):
    """Ids and their provenance letters, of equal length."""

    ids: tuple[int, ...]
    provenance: str


@dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it: `arguments` is JSON of an object, `id` the model's own."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Delta:
    """One more piece of a message: content, reasoning, call_name or call_args of call `index`."""

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
    """A generation as a message. status: text, calls, or malformed (such calls are `content`)."""

    content: str
    calls: tuple[Call, ...]
    status: str
    reasoning: str = ""
    spans: tuple[Span, ...] = ()  # in order, covering the generation
