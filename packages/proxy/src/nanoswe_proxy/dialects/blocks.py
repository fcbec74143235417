"""Replies as blocks, each of one kind, that open, grow and close, as the shapes of a dialect say.

In: a dialect's part of shapes.json, where `$name` stands for a value. Out: the events of a reply,
and the whole of it.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanoswe_proxy import dialects
from nanoswe_proxy.errors import ProxyError
from nanoswe_proxy.render.types import Delta

SHAPES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))


class Stream(dialects.Stream, ABC):
    """See `dialects.Stream`. `facts` are values that only the dialect has."""

    shapes: dict[str, Any]
    number = -1  # of the last event
    ended, failed = False, None

    @abstractmethod
    def facts(self) -> dict[str, Any]: ...

    def start(self) -> bytes:
        self.blocks: list[dict[str, Any]] = []  # values of each
        return self._events(self.shapes["start"])

    def delta(self, delta: Delta, choice: int = 0) -> bytes:
        kind, frames, begins = self.shapes["kinds"][delta.kind], b"", delta.kind == "call_name"
        if begins or not self.blocks or self.blocks[-1]["$kind"] != kind:
            frames, n = self._close(), len(self.blocks)
            ids = {"$call": self.ours("call", delta.index), "$item": self.ours(f"{kind[:2]}_{n}_")}
            said = {"$name": delta.text, "$text": "", "$mark": self.ours("sig")}
            self.blocks.append({"$kind": kind, "$n": n, **ids, **said})
            frames += self._events(self.shapes[kind]["open"], self.blocks[-1])
        if begins:
            return frames
        block = self.blocks[-1]
        block["$text"] += delta.text
        return frames + self._events(self.shapes[kind]["grow"], block | {"$more": delta.text})

    def end(self) -> bytes:
        frames, self.ended = self._close(), True
        return frames + self._events(self.shapes["end"])

    def fail(self, error: ProxyError) -> bytes:
        self.failed = error
        return self._events(self.shapes["fail"])

    def whole(self) -> dict:
        return dict(fill(self.shapes["whole"], self._values()))

    def _values(self) -> dict[str, Any]:
        """By name; what costs something is made where it is wanted."""
        prompt, sampled = self.prompt_tokens, len(self.node.ids) if self.ended else 0
        name = f"{self.shapes['id']}{self.cap[:6]}{self.node.index}"
        return {"$id": name, "$created": self.node.created, "$model": self.model,
                "$prompt": prompt, "$sampled": sampled, "$total": prompt + sampled,
                "$blocks": self._blocks, "$whole": self.whole, **self.facts()}  # fmt: skip

    def _blocks(self) -> list[Any]:
        read = (b | {"$json": partial(json.loads, b["$text"] or "{}")} for b in self.blocks)
        return [fill(self.shapes[b["$kind"]]["whole"], b) for b in read]

    def _close(self) -> bytes:
        if not self.blocks:
            return b""
        return self._events(self.shapes[self.blocks[-1]["$kind"]]["close"], self.blocks[-1])

    def _events(self, shapes: Sequence[Any], values: dict[str, Any] | None = None) -> bytes:
        frames = b""
        for shape in shapes if self.request.stream else ():
            self.number += 1
            event = fill(shape, self._values() | (values or {}) | {"$number": self.number})
            frames += dialects.sse(event, event["type"])
        return frames


def fill(shape: Any, values: Mapping[str, Any]) -> Any:
    """A JSON shape with values in the places of their names."""
    if isinstance(shape, dict):
        return {key: fill(inner, values) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [fill(inner, values) for inner in shape]
    value = values.get(shape, shape) if isinstance(shape, str) else shape
    return value() if callable(value) else value
