"""The session tree: append-only nodes of delta ids, and where a request's messages stand in it.

In: wire-normal messages. Out: the deepest generation that the request extends, what is left to
render, and why it is not the latest one (a reason code). Nothing here edits a committed id:
disagreement is a new branch. A context node holds the messages between two generations, a
generation node what the engine sampled after them.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoswe_proxy import wire
from nanoswe_proxy.render.base import Encoded, Parsed

_ECHO = re.compile(r"call([0-9]+)x([0-9]+)x([0-9a-f]{10})")


@dataclass(slots=True)
class Context:
    """Messages rendered once, from the parent generation (or from nothing) to the next generation
    prompt.
    """

    index: int
    parent: "Generation | None"
    messages: Sequence[dict]
    tools: str  # of a root: the tool list as JSON
    encoded: Encoded
    fork: str
    children: list["Generation"] = field(default_factory=list)


@dataclass(slots=True)
class Generation:
    """One model call. Ids are appended while it runs, frozen from commit on.

    delivery: sampling, committed, delivered, acknowledged or aborted.
    """

    index: int
    parent: Context
    requested: dict
    ids: array = field(default_factory=lambda: array("I"))
    logprobs: array = field(default_factory=lambda: array("d"))
    versions: array = field(default_factory=lambda: array("q"))
    stop: str = "aborted"
    finish_reason: str = ""
    parsed: Parsed = field(default_factory=lambda: Parsed("", (), ""))
    view: dict = field(default_factory=dict)  # the message as served, wire-normal
    delivery: str = "sampling"
    children: list[Context] = field(default_factory=list)

    @property
    def committed(self) -> bool:
        return self.delivery not in ("sampling", "aborted")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands: an existing context, or a parent and the messages that follow it."""

    context: Context | None
    parent: Generation | None
    rest: Sequence[dict]
    fork: str
    level: int  # the weakest match on the way: 0 as served, 1 wire-normal


def echo_id(secret: str, node: int, call: int) -> str:
    """A tool-call id that tells, when it comes back, which generation of which session made it."""
    return f"call{node}x{call}x{_check(secret, node, call)}"


def echoed(secret: str, message: dict) -> int | None:
    """The generation that an assistant message claims by its ids, if one of them is ours."""
    for call in message.get("calls") or ():
        match = _ECHO.fullmatch(call["id"])
        if match and match[3] == _check(secret, int(match[1]), int(match[2])):
            return int(match[1])
    return None


def path(generation: Generation | None) -> list[Context | Generation]:
    """Root context first, `generation` last."""
    nodes: list[Context | Generation] = []
    while generation is not None:
        nodes += (generation, generation.parent)
        generation = generation.parent.parent
    return nodes[::-1]


def ids_of(node: Context | Generation) -> Sequence[int]:
    """The node's own ids."""
    return node.encoded.ids if isinstance(node, Context) else node.ids


def messages_of(node: Context | Generation) -> Sequence[dict]:
    """The node's own messages, as they were rendered or served."""
    return node.messages if isinstance(node, Context) else (node.view,)


def locate(roots: Sequence[Context], messages: Sequence[dict], tools: str, secret: str) -> Place:
    """The deepest place in the forest that `messages` extend; ties go to the latest branch."""
    parent: Generation | None = None
    contexts: Sequence[Context] = [r for r in roots if r.tools == tools]
    at = level = 0
    while True:
        found = _next(contexts, messages, at, secret)
        if found is None:
            break
        context, generation = found
        if generation is None:
            return Place(context, parent, (), "", level)
        at += len(context.messages) + 1
        level = max(level, 0 if generation.view == messages[at - 1] else 1)
        parent, contexts = generation, generation.children
    known = parent.children if parent else roots
    return Place(None, parent, messages[at:], _reason(known, messages[at:], tools), level)


def _next(
    contexts: Sequence[Context], messages: Sequence[dict], at: int, secret: str
) -> tuple[Context, Generation | None] | None:
    for context in reversed(contexts):
        end = at + len(context.messages)
        if len(messages) < end or not all(
            wire.same(a, b) for a, b in zip(context.messages, messages[at:end], strict=True)
        ):
            continue
        if end == len(messages):
            return context, None
        generation = _answer(context, messages[end], secret)
        if generation:
            return context, generation
    return None


def _answer(context: Context, message: dict, secret: str) -> Generation | None:
    """The reply that an assistant message replays: by echo id first, else by content."""
    if message["role"] != "assistant":
        return None
    claimed = echoed(secret, message)
    for generation in reversed(context.children):
        if claimed is not None and generation.index != claimed:
            continue
        if generation.committed and wire.same(generation.view, message):
            return generation
    return None


def _reason(known: Sequence[Context], rest: Sequence[dict], tools: str) -> str:
    """Why `rest` is not among the known contexts; "" when there is nothing to differ from."""
    if not known:
        return "assistant_edited" if any(m["role"] == "assistant" for m in rest) else ""
    latest = known[-1]
    if latest.parent is None and latest.tools != tools:
        return "tools_changed"
    for mine, theirs in zip(latest.messages, rest, strict=False):
        if not wire.same(mine, theirs):
            return (
                "system_changed"
                if "system" in (mine["role"], theirs["role"])
                else "observation_edited"
            )
    if len(rest) <= len(latest.messages):
        return "condensed"
    return (
        "assistant_edited" if rest[len(latest.messages)]["role"] == "assistant" else "reply_dropped"
    )


def _check(secret: str, node: int, call: int) -> str:
    key = f"{secret}/{node}/{call}".encode()
    return hashlib.blake2s(key, digest_size=5).hexdigest()
