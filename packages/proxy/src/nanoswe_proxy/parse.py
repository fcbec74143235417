"""One incremental parser: sampled ids in, deltas of reasoning, content and tool calls out.

A reply that is not streamed is the fold of the stream. A character waits for the last of its ids. A
call is held back until it is well-formed, then comes as one name and one arguments delta; one that
never is comes as content, and the status is `malformed`. No text is lost but newlines that set
calls and reasoning apart. A tag that is a token counts only as that token: in pieces it is text.
"""

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from nanoswe_proxy.errors import RenderError
from nanoswe_proxy.render.codec import BREAK, Codec, clean, escape
from nanoswe_proxy.render.types import Call, Delta, Parsed, Span, Tools


@dataclass(frozen=True)
class Grammar:
    """How replies are written. `read` gets the text of calls, tags included, and the tools, which
    tell the types of bare arguments; without a `close` a call lasts to the end; `anchored`, it
    opens only where the reply begins. `thinking`: the generation prompt has opened the reasoning.
    """

    opens: tuple[str, ...]
    close: str
    read: Callable[[str, Tools], Sequence[Call] | None]
    anchored: bool = False
    think: tuple[str, str] | None = None
    thinking: bool = False


class Reader:
    """Reads one generation; `parsed` is there after `end`."""

    parsed: Parsed

    def __init__(
        self, codec: Codec, grammar: Grammar, stop_ids: Collection[int],
        stops: Collection[str] = (), tools: Tools = None,
    ) -> None:  # fmt: skip
        self.codec, self._grammar, self._stop_ids = codec, grammar, stop_ids
        self._tools, think = tools, grammar.think or ("", "")
        tags = (*grammar.opens, grammar.close, *think)
        firsts = "".join({t[0] for t in tags if t in codec.structural})
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        *self._opens, self._close, self._think_open, self._think_close = (
            t if t in codec.structural else self._mark(t) for t in tags
        )
        self._stops = {spelled for s in stops for spelled in (escape(s), self._mark(s))}
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._starts: list[int] = []  # where in the marked text each id begins
        self._buffer = ""  # marked text that is not decided yet; it begins at `_at`
        self._at = self._searched = 0
        self._gap = ""  # newlines before the call that is open
        self._mode = "reasoning" if grammar.thinking else "content"
        self._bare = True  # the mode has brought nothing but newlines,
        self._trim = grammar.think is not None  # which are then no text
        self._bounds: list[tuple[int, str]] = [(0, self._mode)]
        self._said: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[Call] = []
        self._malformed = self._stopped = False
        self.cut = False  # a stop string came: it and what follows are no content

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What these ids add to what the agent may see."""
        deltas: list[Delta] = []
        for token in ids:
            if self._stopped:
                raise RenderError("the generation went on after its stop token")
            name = self.codec.names.get(token)
            self._stopped = token in self._stop_ids
            if self._stopped or name is not None:
                self._buffer += self._mark(self._bytes.decode(b"", final=True))
            self._starts.append(self._at + len(self._buffer))
            if name is None:
                spelled = self.codec.spell(token, first=len(self._starts) == 1)
                self._buffer += self._mark(self._bytes.decode(spelled))
            elif not self._stopped:
                self._buffer += name
            deltas += self._scan()
        return deltas

    def end(self, truncated: bool) -> list[Delta]:
        """The rest. What is left of a character that was cut off is served as nothing."""
        if not truncated:
            self._buffer += self._mark(self._bytes.decode(b"", final=True))
        deltas = [*self._scan(), *(self._end_call() if self._mode == "call" else ())]
        kept = self._buffer.rstrip("\n") if self._mode == "reasoning" else self._buffer
        if kept.strip("\n") or not (self._bare and self._calls):
            deltas += self._say(len(kept))
        status = "malformed" if self._malformed else "calls" if self._calls else "text"
        content, reasoning = ("".join(self._said[k]) for k in ("content", "reasoning"))
        self.parsed = Parsed(content, tuple(self._calls), status, reasoning, tuple(self._spans()))
        return deltas

    def _mark(self, text: str) -> str:
        """Text in which no tag that is a token can be found."""
        return self._first.sub(r"\g<0>" + BREAK, escape(text))

    def _scan(self) -> Iterator[Delta]:
        while True:
            if self._mode == "call":
                found = self._buffer.find(self._close, self._searched) if self._close else -1
                self._searched = max(self._searched, len(self._buffer) - len(self._close) + 1)
                if found < 0:
                    return
                self._searched = found + 1  # the tag may stand in an argument
                yield from self._add(found + len(self._close))
                continue
            first = self._bare and len(self._bounds) == 1
            opens = self._opens if first or not self._grammar.anchored else []
            tags = [*opens, self._close, *self._stops, self._think_open if first else ""]
            tags = [t for t in (tags if self._mode == "content" else [self._think_close]) if t]
            hits = [(i, -len(t), t) for t in tags if (i := self._buffer.find(t)) >= 0]
            if not hits:
                yield from self._say(self._decided(tags))
                return
            yield from self._turn(min(hits)[0], min(hits)[2])

    def _turn(self, found: int, tag: str) -> Iterator[Delta]:
        """The buffer has `tag` at `found`: what comes before it, then the mode that it begins."""
        if tag in self._stops:
            yield from self._say(found)
            self._take(len(self._buffer))
            self.cut = True
            return
        if tag == self._close and self._mode == "content":
            self._malformed = True
            yield from self._say(found + len(tag))
            return
        text = len(self._buffer[:found].rstrip("\n"))
        yield from self._say(text)
        self._gap = self._take(found - text)
        if tag in (self._think_open, self._think_close):
            self._take(len(tag))
            self._begin("reasoning" if tag == self._think_open else "content", trim=True)
        else:
            self._searched = 0
            self._begin("call")

    def _begin(self, mode: str, *, trim: bool = False) -> None:
        start = self._at
        if self._mode == "content" and self._bare:  # its ids, all newlines, go to the next mode
            start, _ = self._bounds.pop()
        self._bounds.append((start, mode))
        self._mode, self._trim, self._bare = mode, trim, True

    def _add(self, end: int) -> Iterator[Delta]:
        """The calls that the buffer spells up to `end`; if it spells none, nothing happens."""
        calls = self._grammar.read(clean(self._buffer[:end]), self._tools)
        if not calls:
            return
        self._take(end)
        for call in calls:
            yield Delta("call_name", len(self._calls), call.name)
            yield Delta("call_args", len(self._calls), call.arguments)
            self._calls.append(call)
        self._begin("content")

    def _end_call(self) -> Iterator[Delta]:
        """The reply is over inside a call."""
        if not self._close:
            yield from self._add(len(self._buffer))
        if self._mode != "call":
            return
        self._malformed = not self._grammar.anchored  # JSON alone may be meant as JSON
        start, _ = self._bounds.pop()
        self._bounds.append((start, "content"))
        self._mode, self._bare = "content", False
        self._at -= len(self._gap)
        self._buffer = self._gap + self._buffer

    def _decided(self, tags: Sequence[str]) -> int:
        """How much of the buffer cannot be the beginning of a tag or of the newlines before one."""
        sizes = [n for t in tags for n in range(1, len(t)) if self._buffer.endswith(t[:n])]
        return len(self._buffer[: len(self._buffer) - max(sizes, default=0)].rstrip("\n"))

    def _say(self, size: int) -> Iterator[Delta]:
        text = clean(self._take(size))
        text = text.lstrip("\n") if self._trim and self._bare else text
        if text:
            self._bare = False
            self._said[self._mode].append(text)
            yield Delta(self._mode, 0, text)

    def _take(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._at += size
        return taken

    def _spans(self) -> Iterator[Span]:
        """Every id belongs to the part in which its first character stands."""
        if self._mode == "content" and self._bare and self._calls:
            self._bounds.pop()
        size = len(self._starts) - self._stopped
        cuts = [bisect_left(self._starts, at, hi=size) for at, _ in self._bounds] + [size]
        for (_, kind), start, end in zip(self._bounds, cuts[:-1], cuts[1:], strict=True):
            if start < end:
                yield Span(kind, start, end)
        if self._stopped:
            yield Span("end", size, size + 1)
