"""Two tokenizers in one: structural ids come from scaffold only, never from content.

In: marked text, where content stands between OPEN and CLOSE (`guard`) or has its structural
spellings broken (`defuse`). Out: ids and provenance. The text between two structural tokens is
encoded as one run by a content tokenizer that cannot spell them, so ids equal the canonical ones
wherever content spells nothing structural. Refuses (RenderError) an encode that contains a
structural id after all: checked on every run.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from nanoswe_proxy.errors import RenderError
from nanoswe_proxy.render.base import Encoded

# Unicode noncharacters: no text may legally contain them, and text that does is escaped.
OPEN, CLOSE, BREAK, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_MARKS = re.compile("[\ufdd0-\ufdd3]")
_STRIP = re.compile("\ufdd2|\ufdd3([a-d])")
_SIDES = re.compile("([\ufdd0\ufdd1])")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are their own letter
_OTHERS = [b for b in range(256) if b not in _PRINTED]
_ALPHABET = {chr(b): b for b in _PRINTED} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
_TAG = re.compile(r"\s*</?[^<>\s]+>\s*")


class Codec:
    """Encodes and decodes for one tokenizer.json. Immutable after construction."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise RenderError(f"{file} is missing: give a model folder with a tokenizer.json")
        spec = json.loads(file.read_text(encoding="utf-8"))
        self.full = Tokenizer.from_str(json.dumps(spec))
        added = spec.get("added_tokens", [])
        special = [t["content"] for t in added if t["special"]]
        # `<think>` and its like have special=false and carry structure all the same.
        tags = [t["content"] for t in added if not t["special"] and _TAG.fullmatch(t["content"])]
        wanted = {*special, *tags}
        self.structural = {t["content"]: int(t["id"]) for t in added if t["content"] in wanted}
        if any(len(t) < 2 for t in self.structural):
            raise RenderError(f"{file}: a structural token of one character cannot be guarded")
        self._ids = frozenset(self.structural.values())
        self._split = re.compile(f"({_longest_first(self.structural)})")
        self._every_start = _starts(self.structural)
        self._special_start = _starts(special)
        self.names = {i: t for t, i in self.structural.items()}
        self.content = Tokenizer.from_str(json.dumps(_renamed(spec, self.structural)))
        self._context = self.content.encode("a", add_special_tokens=False).ids[-1:]
        self._spelled: dict[tuple[int, bool], bytes] = {}

    def spell(self, token: int, *, first: bool) -> bytes:
        """The bytes of an ordinary token where it stands; some decoders strip a first space."""
        key = (token, first)
        if key not in self._spelled:
            text = self.decode([token] if first else [*self._context, token])
            text = text if first else text.removeprefix(self.decode(self._context))
            name = self.full.id_to_token(token) or ""
            # A token that is no whole character: its name says its bytes.
            self._spelled[key] = _raw(name) if "\ufffd" in text else text.encode()
        return self._spelled[key]

    def guard(self, text: str) -> str:
        """Content that nobody trusts: no structural token can begin, end or lie in it."""
        return OPEN + self._every_start.sub(r"\g<0>" + BREAK, escape(text)) + CLOSE

    def defuse(self, text: str, *, tags: bool = False) -> str:
        """Like `guard`, but neighbours may join. With `tags`, non-special tags pass."""
        return (self._special_start if tags else self._every_start).sub(
            r"\g<0>" + BREAK, escape(text)
        )

    def encode(self, marked: str, outside: str, inside: str) -> Encoded:
        """Ids of marked text; `inside` is the provenance of guarded content."""
        ids: list[int] = []
        provenance: list[str] = []
        for i, part in enumerate(self._split.split(marked)):
            if i % 2:
                ids.append(self.structural[part])
                provenance.append(outside)
            elif part:
                run, kinds = self._run(part, outside, inside)
                ids += run
                provenance.append(kinds)
        return Encoded(tuple(ids), "".join(provenance))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, structural tokens spelled out."""
        return self.full.decode(list(ids), skip_special_tokens=False)

    def _run(self, part: str, outside: str, inside: str) -> tuple[list[int], str]:
        text, edges, kind = "", [], outside
        for piece in _SIDES.split(part):
            if piece in (OPEN, CLOSE):
                kind = inside if piece == OPEN else outside
            elif piece:
                edges.append((len(text), kind))
                text += clean(piece)
        encoding = self.content.encode(text, add_special_tokens=False)
        if not self._ids.isdisjoint(encoding.ids):
            raise RenderError("content was about to encode to a structural token")
        return encoding.ids, _kinds(encoding, edges)


def _kinds(encoding: Encoding, edges: list[tuple[int, str]]) -> str:
    """One letter per id; a token that straddles an edge belongs to the side where it starts."""
    n = len(encoding.ids)
    if len(edges) <= 1:
        return edges[0][1] * n if edges else ""
    offsets = encoding.offsets
    cuts = [bisect_left(offsets, at, key=lambda span: span[0]) for at, _ in edges] + [n]
    return "".join(k * (b - a) for (_, k), a, b in zip(edges, cuts[:-1], cuts[1:], strict=True))


def escape(text: str) -> str:
    """Text in which marks of ours stand for nothing."""
    return _MARKS.sub(lambda m: ESCAPE + "abcd"[ord(m[0]) - 0xFDD0], text)


def clean(text: str) -> str:
    """The inverse of `escape`; breaks are gone."""
    return _STRIP.sub(_unescape, text)


def _raw(name: str) -> bytes:
    """The bytes that a token's name stands for: `<0x0A>`, or the alphabet of byte-level BPE."""
    if _BYTE.fullmatch(name):
        return bytes([int(name[3:-1], 16)])
    return bytes(_ALPHABET[c] for c in name if c in _ALPHABET) or name.encode()


def _unescape(match: re.Match[str]) -> str:
    return chr(0xFDD0 + "abcd".index(match[1])) if match[1] else ""


def _longest_first(tokens: Iterable[str]) -> str:
    return "|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)"


def _starts(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of every spelling, overlapping ones too."""
    firsts: dict[str, list[str]] = {}
    for token in tokens:
        firsts.setdefault(token[0], []).append(token[1:])
    return re.compile(
        "|".join(f"{re.escape(c)}(?={_longest_first(rests)})" for c, rests in firsts.items())
        or r"(?!)"
    )


def _renamed(spec: dict, structural: Iterable[str]) -> dict:
    """The same tokenizer with unguessable spellings of structural tokens.

    Renamed and not removed: a tokenizer.json without some added tokens gives the others new ids.
    """
    names = {t: OPEN + secrets.token_hex(16) for t in structural}
    spec = dict(spec, post_processor=None)
    spec["added_tokens"] = [
        {**t, "content": names.get(t["content"], t["content"])} for t in spec["added_tokens"]
    ]
    vocab = spec["model"].get("vocab")
    if isinstance(vocab, dict):
        model_vocab = {names.get(t, t): i for t, i in vocab.items()}
        spec["model"] = {**spec["model"], "vocab": model_vocab}
    return spec
