"""What a template's family is, learned from what the template writes for probes; and messages as
templates read them, with anchors that show in the text what an assistant says where.

Refuses (RenderError) a template in which no structural token ends a reply, or nothing begins one.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

from nanoswe_proxy.errors import RenderError, TemplateRefused
from nanoswe_proxy.parse import Grammar
from nanoswe_proxy.render import syntax
from nanoswe_proxy.render.codec import ANCHOR, CLOSE, OPEN, Codec, map_strings
from nanoswe_proxy.render.template import Template
from nanoswe_proxy.render.types import Message, Messages, Parsed

REASONING = ("reasoning_content", "reasoning", "thinking")  # templates' names for one thing
ANCHORED = re.compile(f"{ANCHOR}([crn])([0-9]+){ANCHOR}")
THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def anchor(kind: str, index: int) -> str:
    """Marks a place in what message `index` says: c content, r reasoning, n a call's name."""
    return f"{ANCHOR}{kind}{index}{ANCHOR}"


USER = {"role": "user", "content": OPEN + "u" + CLOSE}
TOOL = {"role": "tool", "content": OPEN + "t" + CLOSE, "name": syntax.NAME,
        "tool_call_id": syntax.ID}  # fmt: skip
SAY = {"role": "assistant", "content": anchor("c", 1)}
FUNCTION = {"name": anchor("n", 1) + syntax.NAME, "arguments": syntax.ARGUMENTS}
CALL = {"id": syntax.ID, "type": "function", "function": FUNCTION}
CALLS = {"role": "assistant", "content": ""}


@dataclass(frozen=True)
class Family:
    """`heads` end where replies begin; `extra` is what only a generation prompt adds to them.

    `enders` are the structural tokens after a reply. Where they are `openers`, they belong to the
    next turn. A reply of the template has at most `most_calls` calls, written as `calls`.
    """

    heads: tuple[str, ...]
    extra: str
    enders: tuple[str, ...]
    openers: frozenset[str]
    think: tuple[str, str] | None
    calls: str = ""
    most_calls: int = 0

    @cached_property
    def grammar(self) -> Grammar:
        """For reading replies."""
        base = syntax.learn(self.calls) if self.calls else syntax.NO_CALLS
        prompt, (opening, close) = self.heads[0] + self.extra, self.think or ("", "")
        opened = bool(self.think) and prompt.rfind(opening) > prompt.rfind(close)
        return replace(base, think=self.think, thinking=opened)


@dataclass(frozen=True)
class Region:
    """Where in a template's text message `index` speaks; `end` is where `ender` stands."""

    index: int
    start: int
    end: int
    ender: str


def regions(text: str, family: Family) -> list[Region]:
    """The replies in `text` that have left an anchor there, in order."""
    spots: dict[int, list[int]] = {}
    for match in ANCHORED.finditer(text):
        spots.setdefault(int(match[2]), []).extend(match.span())
    found: list[Region] = []
    for i, spot in sorted(spots.items()):
        low = found[-1].end if found else 0
        starts = [at + len(h) for h in family.heads if (at := text.rfind(h, low, spot[0])) >= 0]
        if not starts:
            raise RenderError(f"reply {i} does not begin as others do: {text[low : spot[0]]!r}")
        ends = [(at, e) for e in family.enders if (at := text.find(e, spot[-1])) >= 0]
        found.append(Region(i, max(starts), *min(ends, default=(len(text), ""))))
    return found


def learn(template: Template, codec: Codec) -> Family:
    """The family of a template."""
    think = next((pair for pair in THINK if pair[1] in template.source), None)
    thought = SAY | dict.fromkeys(REASONING, anchor("r", 1))
    shapes = ([USER, SAY], [USER, SAY, USER], [USER, thought, USER])
    replies = [template.render(m, None, False) for m in shapes]
    alone, followed = (text.rpartition(ANCHOR)[2] for text in replies[:2])
    ender = codec.structure.search(followed)
    if ender is None:
        raise RenderError(f"the chat template ends a reply with no special token: {followed!r}")
    prompt = template.render([USER], None, True)
    head, extra = _head(prompt, [r.partition(CLOSE)[2] for r in replies], codec, think)
    openers = [] if codec.structure.search(alone) else [ender[0]]
    family = Family((head,), extra, (ender[0],), frozenset(openers), think)
    try:
        call, pair = (CALLS | {"tool_calls": [CALL] * n} for n in (1, 2))
        followed = template.render([USER, call, TOOL], None, False)
        prompt = template.render([USER, call, TOOL], None, True)
        answer = template.render([USER, call, TOOL, SAY, USER], None, False)
    except TemplateRefused:
        followed = ""
    if syntax.NAME not in followed:
        return family
    other, _ = _head(prompt, [answer.partition("t" + CLOSE)[2]], codec, think)
    if not other.startswith(head):
        family = replace(family, heads=(head, other))
    if openers:
        written = template.render([USER, call], None, False).rpartition(ANCHOR)[2]
        opener = codec.structure.search(followed.rpartition(ANCHOR)[2].removeprefix(written))
        enders = (ender[0], opener[0]) if opener else (ender[0],)
        family = replace(family, openers=frozenset(enders), enders=enders)
    (region,) = regions(followed, family)
    one = ANCHORED.sub("", followed[region.start : region.end])
    if OPEN in one:
        raise RenderError(f"the chat template ends calls as it ends no other reply: {one!r}")
    try:
        most = 1000 * bool(template.render([USER, pair, TOOL, TOOL], None, False))
    except TemplateRefused:
        most = 1
    one = one.rpartition(think[1])[2] if think else one
    return replace(family, calls=one, most_calls=most)


def _head(
    prompt: str, written: Sequence[str], codec: Codec, think: tuple[str, str] | None
) -> tuple[str, str]:
    """From the last structural token before a reply that is not of reasoning; and what is extra."""
    prompt = prompt.rpartition(CLOSE)[2]
    shared = commonprefix([prompt, *(w.partition(ANCHOR)[0] for w in written)])  # noqa: RUF071
    found = [m for m in codec.structure.finditer(shared) if m[0].strip() not in (think or ())]
    if not shared:
        raise RenderError("nothing in the chat template tells where a reply begins")
    return shared[found[-1].start() if found else 0 :], prompt[len(shared) :]


def for_template(
    messages: Messages, codec: Codec, known: Mapping[int, Parsed], family: Family, every: bool
) -> list[dict]:
    """`known` replies, by index, are anchors only: their ids will stand there. An empty one has a
    place where `every` one wants it: templates ask whether it is empty.
    """
    called: dict[str, dict] = {}
    out: list[dict] = []
    for i, message in enumerate(messages):
        said: dict[str, Any] = {"role": message["role"]}
        wire = message.get("call_id") or ""
        if said["role"] == "assistant":
            reply = known.get(i)
            calls = [_call(c, i, codec) for c in message.get("calls") or ()]
            for call, own in zip(calls, reply.calls if reply else (), strict=False):
                call["id"] = own.id or call["id"]
            wires = [c.get("id", "") for c in message.get("calls") or ()]
            called |= dict(zip(wires, calls, strict=True))
            content, reasoning = _spoken(message, i, codec, reply, family.think)
            bare = (every or reply is not None) and not calls and not content.strip()
            said["content"] = content + anchor("c", i) * bare
            said |= dict.fromkeys(REASONING, reasoning) if reasoning else {}
            said |= {"tool_calls": calls[: family.most_calls if reply else None]} if calls else {}
        else:
            said["content"] = codec.guard(message["content"])
        if said["role"] == "tool":
            call = called.get(wire) or {"id": _nine(wire), "function": {"name": "tool"}}
            said |= {"tool_call_id": call["id"], "name": call["function"]["name"].split(ANCHOR)[-1]}
        out.append(said)
    return out


def _spoken(
    message: Message, i: int, codec: Codec, reply: Parsed | None, think: tuple[str, str] | None
) -> tuple[str, str]:
    if reply:
        return anchor("c", i) if reply.content else "", anchor("r", i) if reply.reasoning else ""
    text = message.get("content") or ""
    # Templates cut reasoning out of content by its tags; where these are no pair, they are text.
    paired = not think or (text.lstrip().startswith(think[0]) and think[1] in text)
    text = codec.defuse(text, tags=paired or not any(tag in text for tag in think or ()))
    if inner := text.strip():
        text = text.replace(inner, anchor("c", i) + inner + anchor("c", i))
    reasoning = codec.defuse(message.get("reasoning") or "")
    return text, reasoning and anchor("r", i) + reasoning


def _call(call: Message, i: int, codec: Codec) -> dict:
    try:
        arguments = map_strings(json.loads(call["arguments"]), codec.guard, codec.defuse)
    except ValueError:
        arguments = codec.defuse(call["arguments"])
    function = {"name": anchor("n", i) + codec.defuse(call["name"]), "arguments": arguments}
    return {"id": _nine(call.get("id", "")), "type": "function", "function": function}


def _nine(wire: str) -> str:
    """An id as Mistral's templates want it: nine letters or digits."""
    fits = len(wire) == 9 and wire.isascii() and wire.isalnum()
    return wire if fits else hashlib.blake2s(wire.encode()).hexdigest()[:9]
