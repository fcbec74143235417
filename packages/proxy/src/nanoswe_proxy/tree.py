"""The session tree: append-only nodes of delta ids, and where a request's messages stand in it.

In: wire-normal messages. Out: the deepest generation that the request extends, what is left to
render, and why it is not the latest one (a reason code). Nothing here edits a committed id:
disagreement is a new branch. A context node holds the messages between two generations, a
generation node what the engine sampled after them; ids are arrays, so a token costs its bytes.
"""

import hashlib
import json
import re
import zlib
from array import array
from bisect import bisect_left
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from nanoswe_proxy import wire

EDITED = ("assistant_edited", "observation_edited", "reply_dropped")
tool_list = lru_cache(maxsize=64)(json.loads)  # of a lineage's `tools`: not to be changed
# One match on the way down: `generation` is None where the request ends in `context`.
_Step = namedtuple("_Step", "context generation at level")
_ECHO = re.compile(r"([0-9]+)x([0-9]+)x([0-9a-f]{10})")


@dataclass(slots=True)
class Context:
    """Messages rendered once, from the parent generation or nothing to the next prompt's end."""

    index: int
    parent: "Generation | None"
    messages: Sequence[dict]
    tools: str  # the tool list as JSON, of the whole lineage
    ids: Sequence[int]
    packed: bytes  # provenance: a letter for each id, in runs that cost next to nothing
    fork: str
    children: tuple["Generation", ...] = ()

    @property
    def raw(self) -> bool:
        """A completion's prompt: no messages, nothing extends it."""
        return not (self.parent or self.messages)

    @property
    def provenance(self) -> str:
        return zlib.decompress(self.packed).decode()


@dataclass(slots=True)
class Generation:
    """One model call. Ids are appended while it runs, frozen from commit on.

    delivery: sampling, committed, delivered, acknowledged or aborted.
    """

    index: int
    parent: Context
    requested: dict
    created: int = 0
    digest: str = ""  # of the request's body
    choice: int = 0  # which reply to that request it is
    ids: array = field(default_factory=lambda: array("I"))
    logprobs: array = field(default_factory=lambda: array("f"))
    versions: list[list[int]] = field(default_factory=list)  # runs: [first position, version]
    stop: str = "aborted"
    finish_reason: str = ""
    parse: str = ""
    view: dict = field(default_factory=dict)  # the message as served, wire-normal
    delivery: str = "sampling"
    children: tuple[Context, ...] = ()

    @property
    def messages(self) -> Sequence[dict]:
        return (self.view,)

    @property
    def committed(self) -> bool:
        return self.delivery not in ("sampling", "aborted")

    def versions_of_tokens(self) -> list[int]:
        """The weight version of each token."""
        ends = [*(start for start, _ in self.versions[1:]), len(self.ids)]
        runs = zip(self.versions, ends, strict=True) if self.versions else ()
        return [version for (start, version), end in runs for _ in range(end - start)]

    def append(self, token: int, logprob: float, version: int) -> None:
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append([len(self.ids), version])
        self.ids.append(token)
        self.logprobs.append(logprob)


@dataclass(frozen=True, slots=True)
class Place:
    """An existing context, or a parent and the messages that follow it."""

    context: Context | None
    parent: Generation | None
    rest: Sequence[dict]
    tools: str
    fork: str
    level: int  # the weakest match on the way: 0 as served, 1 wire-normal, 2 lossy but unambiguous


def echo_id(secret: str, node: int, call: int, prefix: str = "call") -> str:
    """An id that tells, when it comes back, which generation of which session made it."""
    return f"{prefix}{node}x{call}x{_check(secret, node, call)}"


def echoed(secret: str, message: dict) -> int | None:
    """The generation that an assistant message claims by an id of ours, if it brings one back."""
    for text in (*(c["id"] for c in message.get("calls") or ()), message.get("echo", "")):
        for node, call, check in _ECHO.findall(text):
            if check == _check(secret, int(node), int(call)):
                return int(node)
    return None


def path(generation: Generation | None) -> list[Context | Generation]:
    """Root context first, `generation` last."""
    nodes: list[Context | Generation] = []
    while generation is not None:
        nodes += (generation, generation.parent)
        generation = generation.parent.parent
    return nodes[::-1]


def prompt(context: Context) -> array:
    """All ids up to and with a context."""
    ids = array("I")
    for earlier in (*path(context.parent), context):
        ids.extend(earlier.ids)
    return ids


def locate(roots: Sequence[Context], messages: Sequence[dict], tools: str, secret: str) -> Place:
    """The deepest place in the forest that `messages` extend; ties go to the latest branch.

    A lossy match (level 2) is taken only where nothing matches better and nothing else as well.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    best = _straight([c for c in roots if c.tools == tools], messages)
    front = [best]
    while front:
        found = [f for step in front for f in _next(step, roots, (messages, turns, tools, secret))]
        front = [f for f in found if f.level < wire.LOSSY]
        if not front and len(found) == 1:
            front = found
        for step in front:
            best = step if step.at >= best.at else best
        front = [f for f in front if f.generation]
    if best.context and not best.generation:
        return Place(best.context, best.context.parent, (), tools, "", best.level)
    known = best.generation.children if best.generation else roots
    rest = messages[best.at :]
    fork = _reason(known, rest, tools, len(found) > 1)
    return Place(None, best.generation, rest, tools, fork, best.level)


def _straight(known: Sequence[Context], messages: Sequence[dict]) -> _Step:
    """As far down as there is one way only, and the request goes it word for word."""
    step = _Step(None, None, 0, 0)
    while len(known) == 1 and len(known[0].children) == 1:
        (context,), (reply,) = known, known[0].children
        end = step.at + len(context.messages)
        if not reply.committed or messages[end : end + 1] != [reply.view]:
            break
        if messages[step.at : end] != context.messages:
            break
        step, known = _Step(context, reply, end + 1, 0), reply.children
    return step


def _next(step: _Step, roots: Sequence[Context], request: tuple) -> list[_Step]:
    """Every match of the next stretch of messages, and of the reply after it."""
    messages, turns, tools, secret = request
    found = []
    for context in step.generation.children if step.generation else roots:
        if step.generation is None and context.tools != tools:
            continue
        # a stretch reaches to the reply that follows as many replies as the context holds itself
        inside = sum(m["role"] == "assistant" for m in context.messages)
        later = bisect_left(turns, step.at) + inside
        end = turns[later] if later < len(turns) else len(messages)
        level = max(step.level, wire.level_of_all(context.messages, messages[step.at : end]))
        if level > wire.LOSSY:
            continue
        if end == len(messages):
            found.append(_Step(context, None, end, level))
            continue
        claimed = echoed(secret, messages[end])
        for generation in context.children:
            if generation.committed and claimed in (None, generation.index):
                match = wire.level_of(generation.view, messages[end], claimed is not None)
                if match <= wire.LOSSY:
                    found.append(_Step(context, generation, end + 1, max(level, match)))
    return found


def _reason(known: Sequence[Context], rest: Sequence[dict], tools: str, ambiguous: bool) -> str:
    """Why `rest` is not among the known contexts; "" when there is nothing to differ from."""
    if ambiguous:
        return "ambiguous"
    if not known:
        return "assistant_edited" if any(m["role"] == "assistant" for m in rest) else ""
    latest = next((c for c in reversed(known) if c.tools == tools), known[-1])
    for mine, theirs in zip(latest.messages, rest, strict=False):
        if wire.level_of(mine, theirs) > wire.LOSSY:
            system = "system" in (mine["role"], theirs["role"])
            return "system_changed" if system else "observation_edited"
    if latest.tools != tools:
        return "tools_changed"
    if len(rest) <= len(latest.messages):
        return "condensed"
    reply = rest[len(latest.messages)]["role"] == "assistant"
    return "assistant_edited" if reply else "reply_dropped"


def prompt_key(ids: Sequence[int]) -> str:
    """Names a completion's prompt."""
    return hashlib.blake2s(array("I", ids).tobytes(), digest_size=16).hexdigest()


def _check(secret: str, node: int, call: int) -> str:
    key = f"{secret}/{node}/{call}".encode()
    return hashlib.blake2s(key, digest_size=5).hexdigest()
