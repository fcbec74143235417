"""One renderer for every chat template: the template itself writes, marks in its text tell whose
words stand where, and sampled ids are put in their places.

In: a model folder (tokenizer.json, chat template). Out: a Renderer. Witness
conversations prove at load that extension gives what rendering from nothing gives. Refuses
(RenderError) a folder where it does not. `thinking`: "keep" leaves sampled reasoning in the history
for good; "template" follows the template, which may force a root.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product, takewhile
from pathlib import Path

from nanoswe_proxy.errors import RenderError, TemplateRefused, Unextendable
from nanoswe_proxy.parse import Reader
from nanoswe_proxy.render import family as families
from nanoswe_proxy.render.codec import SAID, UNSAID, Codec, map_strings
from nanoswe_proxy.render.family import Region, anchor, for_template, regions
from nanoswe_proxy.render.template import Template, read_json
from nanoswe_proxy.render.types import Encoded, Messages, Parsed, Replay, Tools
from nanoswe_proxy.trajectory import Provenance

SAMPLED, SCAFFOLD, OBSERVED = Provenance.SAMPLED, Provenance.SCAFFOLD, Provenance.OBSERVED
FOREIGN, REPLAYED, SYNTHETIC = Provenance.FOREIGN, Provenance.REPLAYED, Provenance.SYNTHETIC
ALSO_STOP = ("<|endoftext|>", "<|eom_id|>")
OPENING = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
CONFLICT = "conflict"
WITNESS = json.loads(Path(__file__).with_name("witness.json").read_text(encoding="utf-8"))
TOOL = WITNESS["tool"]


class Renderer:
    """One chat template over one tokenizer."""

    def __init__(self, folder: Path | str, *, thinking: str = "keep") -> None:
        folder = Path(folder)
        if thinking not in ("keep", "template"):
            raise RenderError(f"thinking must be keep or template, not {thinking!r}")
        self.codec, self.keep = Codec(folder), thinking == "keep"
        self._template = Template(folder)
        self.family = families.learn(self._template, self.codec)
        structural = self.codec.structural
        ends = [structural[t] for t in (*self.family.enders, *ALSO_STOP) if t in structural]
        for name in ("generation_config.json", "config.json"):
            eos = read_json(folder / name).get("eos_token_id")
            ends += [i for i in (eos if isinstance(eos, list) else [eos]) if i in self.codec.names]
        self.stop_ids = tuple(dict.fromkeys(ends))
        self.end_id = self.stop_ids[0]
        self._openers = {structural[t] for t in self.family.openers}
        self._prompt = lru_cache(maxsize=4)(
            lambda system, tools: self._render(OPENING[not system :], [TOOL] * tools, {})
        )
        self.extended = _prove(self)

    def root(self, messages: Messages, tools: Tools, replay: Replay) -> Encoded:
        """A whole history from nothing, generation prompt included."""
        known = self._known(replay, tools)
        text = self._render(messages, tools, known)
        found = regions(text, self.family)
        replies = self._replies(text, found, replay, known)
        if len(replies) < len(replay):  # the others come as text, as the template cuts them
            return self.root(messages, tools, {i: replay[i] for i in replies})
        return _join(self._place(text, found, replies))

    def tail(
        self, messages: Messages, last: Sequence[int], replay: Replay,
        history: Messages = (), tools: Tools = None, said: Parsed | None = None,
    ) -> Encoded:  # fmt: skip
        """What follows the generation whose sampled ids are `last`: its end (synthetic if it was
        not sampled), messages, generation prompt. `history` came before, as served, up to the reply
        that `last` spells, which is `said`. Raises Unextendable where the template would now write
        it otherwise: the caller starts a root, with that reason.
        """
        system = bool(history) and history[0]["role"] == "system"
        reply = history[-1] if history else {"role": "assistant", "content": ""}
        at = 1 + system
        moved = {i + at + 1: ids for i, ids in replay.items()}
        known, thought = self._known(moved, tools), "" if self.keep else _recent_thought(history)
        said = said or self._known({at: last}, tools)[at]
        known[at] = replace(said, reasoning=thought)
        conversation = [*OPENING[not system :], reply, *messages]
        text = self._render(conversation, [TOOL] if tools else None, known)
        region, *found = regions(text, self.family)
        # What the template writes up to the reply must be what it wrote as the reply's prompt.
        if text[: region.start] + self.family.extra != self._prompt(system, bool(tools)):
            raise Unextendable("template_rewrote")
        replies = self._replies(text, found, moved, known)
        gone = thought and anchor("r", at) not in text
        extra = self.keep or self._extra(text, region) == self.family.extra
        if gone or not extra or len(replies) < len(moved):
            raise Unextendable("thinking_retention")
        stop = self._stop(last, region.ender)
        if stop == CONFLICT:
            raise Unextendable("role_marker_conflict")
        placed = self._place(text, found, replies, region.end, stop)
        return _join([self._close_thought(last, said), *placed])

    def reader(self, tools: Tools = None, stops: Sequence[str] = ()) -> Reader:
        return Reader(self.codec, self.family.grammar, self.stop_ids, stops, tools)

    def parse(self, ids: Sequence[int], truncated: bool, tools: Tools = None) -> Parsed:
        """The message that sampled ids spell: the fold of a reader."""
        reader = self.reader(tools)
        reader.feed(ids)
        reader.end(truncated)
        return reader.parsed

    def render_messages(self, messages: Messages, tools: Tools = None) -> list[Encoded]:
        """A finished conversation for SFT: context and would-be-sampled ids in turn."""
        text = self._render(messages, tools, {}, prompt=False)
        rendered: list[Encoded] = []
        at, end, stop = 0, "", ""  # stretches begin after an end token that is no part of them
        for region in regions(text, self.family):
            start = region.start + len(self._extra(text, region))
            rendered.append(self._encode(end + text[at:start], stop=stop))
            at, end, stop = region.end + len(region.ender), self.family.enders[0], SAMPLED
            rendered.append(self._encode(end + text[start:at], SAMPLED, SAMPLED, stop))
        rest = [self._encode(end + text[at:], stop=stop)] if text[at:].strip() else []
        return rendered + rest

    def sampled(self, messages: Messages, tools: Tools) -> dict[int, tuple[int, ...]]:
        """Replies, by index, as a model would sample them after its own prompts, the last not."""
        grammar, rendered = self.family.grammar, self.render_messages(messages, tools)
        close = grammar.think[1] if grammar.think and grammar.thinking else ""
        closed = self.codec.encode(f"\n{close}\n\n", "s", "s").ids if close else ()
        at = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        replies = {}
        for i, context, body in zip(at[:-1], rendered[::2], rendered[1::2], strict=False):
            opened = self.codec.decode(context.ids).endswith(self.family.extra)
            thought = opened or close in self.codec.decode(body.ids)
            replies[i] = body.ids if thought else (*closed, *body.ids)
        return replies

    def _render(
        self, messages: Messages, tools: Tools, known: Mapping[int, Parsed], prompt: bool = True
    ) -> str:
        defuse = self.codec.defuse
        marked = for_template(messages, self.codec, known, self.family, not prompt)
        safe = map_strings(list(tools), defuse, defuse) if tools else None
        return self._template.render(marked, safe, prompt)

    def _known(self, replay: Replay, tools: Tools) -> dict[int, Parsed]:
        cut = {i: not ids or ids[-1] not in self.stop_ids for i, ids in replay.items()}
        return {i: self.parse(ids, cut[i], tools) for i, ids in replay.items()}

    def _extra(self, text: str, region: Region) -> str:
        """The generation prompt's own part, where the template writes it in a history too."""
        return self.family.extra if text.startswith(self.family.extra, region.start) else ""

    def _replies(
        self, text: str, found: Sequence[Region], replay: Replay, known: Mapping[int, Parsed]
    ) -> dict[int, tuple[str, Sequence[int]]]:
        """By index, what the prompt added and the ids; not of replies whose reasoning is gone."""
        replies = {}
        for i, region in ((r.index, r) for r in found if r.index in replay):
            extra = self.family.extra if self.keep else self._extra(text, region)
            if self.keep or not known[i].reasoning or anchor("r", i) in text:
                replies[i] = (extra, replay[i])
        return replies

    def _place(
        self, text: str, found: Sequence[Region], replies: Mapping[int, tuple[str, Sequence[int]]],
        at: int = 0, stop: str = "",
    ) -> Iterator[Encoded]:  # fmt: skip
        """`text` from `at`, replies in their places. `stop`: of the reply that ends at `at`."""
        marked = ""
        for region in found:
            if region.index in replies:
                extra, ids = replies[region.index]
                yield self._encode(marked + text[at : region.start] + extra, stop=stop)
                stop = self._stop(ids, region.ender)
                ids = ids[:-1] if stop == CONFLICT else ids
                yield Encoded(tuple(ids), REPLAYED * len(ids))
                at, marked = region.end, ""
            else:
                own = "" if region.ender in self.family.openers else region.ender
                end = region.end + len(own)
                marked += text[at : region.start] + SAID + text[region.start : end] + UNSAID
                at = end
        yield self._encode(marked + text[at:], stop=stop)

    def _stop(self, ids: Sequence[int], ender: str) -> str:
        """What becomes of `ender` after `ids`: it is there, it is another's, it has to be added."""
        last = ids[-1] if ids else -1
        if last == self.codec.structural.get(ender):
            return SAMPLED
        return CONFLICT if last in self._openers else SYNTHETIC

    def _encode(
        self, text: str, outside: str = SCAFFOLD, inside: str = OBSERVED, stop: str = ""
    ) -> Encoded:
        """Ids of text that may begin with the end token of the reply before it."""
        ids, kinds = self.codec.encode(text, outside, inside, FOREIGN)
        if stop == SAMPLED:  # it is that reply's
            return Encoded(ids[1:], kinds[1:])
        return Encoded(ids, SYNTHETIC + kinds[1:] if stop == SYNTHETIC else kinds)

    def _close_thought(self, last: Sequence[int], said: Parsed) -> Encoded:
        """Reasoning that was cut off is closed before its turn is."""
        kind, start, end = said.spans[-1] if said.spans else ("", 0, 0)
        close = self.family.think[1] if self.family.think else ""
        if kind != "reasoning" or self.codec.decode(last[start:end]).rstrip().endswith(close):
            return Encoded((), "")
        return self.codec.encode(f"\n{close}\n\n", SYNTHETIC, SYNTHETIC)


def _recent_thought(history: Messages) -> str:
    """Reasoning since the last user message: what templates keep until the next one."""
    recent = takewhile(lambda m: m["role"] != "user", reversed(history))
    return next((str(m["reasoning"]) for m in recent if m.get("reasoning")), "")


def _join(parts: Iterable[Encoded]) -> Encoded:
    ids, kinds = zip(*parts, strict=True)
    return Encoded(tuple(chain.from_iterable(ids)), "".join(kinds))


def _prove(renderer: Renderer) -> int:
    """The number of witness conversations that can be extended turn by turn."""
    extended = 0
    for messages, tools in product(WITNESS["conversations"], (None, [TOOL])):
        if renderer.family.calls or not any("calls" in m for m in messages):
            with suppress(TemplateRefused, Unextendable):  # no witness against what is written
                extended += _extends(renderer, messages, tools)
    if not extended:
        raise RenderError("the chat template rewrites every history: nothing can be extended")
    return extended


def _extends(r: Renderer, messages: Messages, tools: Tools) -> bool:
    replay = r.sampled([*messages, {"role": "assistant", "content": "end"}], tools)
    at = list(replay)
    path = list(r.root(messages[: at[0]], tools, {}).ids)
    for i, after in zip(at, [*at[1:], len(messages)], strict=True):
        read = r.parse(replay[i], False, tools)
        wrote = [(c["name"], c["arguments"]) for c in messages[i].get("calls", ())]
        got = [(c.name, c.arguments) for c in read.calls]
        if (read.content, got) != (messages[i]["content"], wrote):
            raise RenderError(f"a reply reads as {read}, but was written as {messages[i]}")
        tail = r.tail(messages[i + 1 : after], replay[i], {}, messages[: i + 1], tools)
        path += [*replay[i], *tail.ids]
    if path != list(r.root(messages, tools, replay).ids):
        raise RenderError(f"extension gives {r.codec.decode(path)!r}, the template another text")
    return True
