"""Two tokenizers in one: structural ids come from scaffold only, never from content.

In: text with marks around content and replies. Out: ids and provenance. A copy of the tokenizer in
which structural tokens have unguessable names encodes the whole text at once: ids are the canonical
ones wherever content spells nothing structural. Refuses (RenderError) an encode whose structural
ids are not scaffold's: checked every time.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from nanoswe_proxy.errors import BadRequest, RenderError
from nanoswe_proxy.render.types import Encoded

# Unicode noncharacters: no text may legally contain them, and text that does is escaped.
MARKS = [chr(0xFDD0 + n) for n in range(8)]
OPEN, CLOSE, BREAK, ESCAPE, SAID, UNSAID, ANCHOR, CUT = MARKS
_MARKS = re.compile("[\ufdd0-\ufdd7]")
_STRIP = re.compile("\ufdd2|\ufdd3([a-h])")
_ANCHORS = re.compile("\ufdd6.*?\ufdd6")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are their own letter
_OTHERS = [b for b in range(256) if b not in _PRINTED]
_ALPHABET = {chr(b): b for b in _PRINTED} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
_TAG = re.compile(r"\s*[<\[]/?[^<>\[\]\s]+[>\]]\s*")


class Codec:
    """Encodes and decodes for one tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise RenderError(f"{file} is missing: give a model folder with a tokenizer.json")
        try:
            self.full = Tokenizer.from_str(file.read_text(encoding="utf-8"))
            spec = json.loads(self.full.to_str())
        except Exception as error:  # tokenizers raises Exception itself
            raise RenderError(f"{file} is no tokenizer: {error}") from error
        added = spec.get("added_tokens") or []
        special = [t["content"] for t in added if t["special"]]
        # `<think>` and its like have special=false and carry structure all the same.
        tags = [t["content"] for t in added if not t["special"] and _TAG.fullmatch(t["content"])]
        ids = {t["content"]: int(t["id"]) for t in added}
        self.structural = {t: ids[t] for t in (*special, *tags)}
        self.names = {i: t for t, i in self.structural.items()}
        # What stands for text that the vocabulary lacks is no structure.
        unknown = self.structural.get(str(spec["model"].get("unk_token")))
        self._ids = frozenset(self.structural.values()) - {unknown}
        self.structure = re.compile(_longest_first(self.structural))
        self._every_start = _starts([*self.structural])
        self._special_start = _starts(special)
        self._secret = {t: OPEN + secrets.token_hex(16) for t in self.structural}
        self._content = Tokenizer.from_str(json.dumps(_renamed(spec, self._secret)))
        self._context = self._content.encode("a", add_special_tokens=False).ids[-1:]
        self._spelled: dict[tuple[int, bool], bytes] = {}

    def spell(self, token: int, *, first: bool) -> bytes:
        """The bytes of an ordinary token where it stands; some decoders strip a first space."""
        if (token, first) not in self._spelled:
            context = [] if first else self._context
            text = self.decode([*context, token]).removeprefix(self.decode(context))
            raw = text.encode()
            if "\ufffd" in text:  # no whole character: the token's name says its bytes
                name = self.full.id_to_token(token) or ""
                byte = _BYTE.fullmatch(name)
                letters = bytes(_ALPHABET[c] for c in name if c in _ALPHABET)
                raw = bytes([int(byte[1], 16)]) if byte else letters or raw
            self._spelled[token, first] = raw
        return self._spelled[token, first]

    def guard(self, text: str) -> str:
        """Content that nobody trusts. White space stays outside: templates may trim it."""
        inner = text.strip()
        before, _, after = text.partition(inner) if inner else (text, "", "")
        return before + (OPEN + self.defuse(inner) + CLOSE if inner else "") + after

    def defuse(self, text: str, *, tags: bool = False) -> str:
        """Like `guard`, but neighbours may join. With `tags`, non-special tags pass."""
        starts = self._special_start if tags else self._every_start
        return starts.sub(r"\g<0>" + BREAK, escape(text))

    def encode(self, marked: str, outside: str, inside: str, said: str = "f") -> Encoded:
        """Ids of marked text, with the provenance of scaffold, guarded content and replies."""
        text, edges, structure = "", [], []
        guarded = speaking = False
        marked = _ANCHORS.sub("", marked)
        for side in (OPEN, CLOSE, SAID, UNSAID):
            marked = marked.replace(side, CUT + side + CUT)
        for piece in marked.split(CUT):
            if piece in (OPEN, CLOSE):
                guarded = piece == OPEN
            elif piece in (SAID, UNSAID):
                speaking = piece == SAID
            elif piece:
                edges.append((len(text), said if speaking else inside if guarded else outside))
                if not guarded:
                    structure += [self.structural[t] for t in self.structure.findall(piece)]
                    piece = self.structure.sub(lambda m: self._secret[m[0]], piece)
                text += clean(piece)
        # A batch of one: `encode` alone would hold the interpreter's lock all the while.
        (encoding,) = self._content.encode_batch([text], add_special_tokens=False)
        ids = tuple(encoding.ids)
        if [*filter(self._ids.__contains__, ids)] != [i for i in structure if i in self._ids]:
            raise RenderError("content was about to encode to a structural token")
        return Encoded(ids, _kinds(encoding, edges))

    def raw(self, prompt: str | Sequence[int]) -> Encoded:
        """A completion's prompt: ids as they are; text as the tokenizer has it, begun once."""
        if isinstance(prompt, str):
            begin = (self.full.encode("a", add_special_tokens=b) for b in (True, False))
            first, plain = (encoding.ids[:1] for encoding in begin)
            (encoding,) = self.full.encode_batch([prompt], add_special_tokens=False)
            begun = first == plain or encoding.ids[:1] == first
            prompt = encoding.ids if begun else first + encoding.ids
        if not prompt or any(self.full.id_to_token(i) is None for i in set(prompt)):
            raise BadRequest("a prompt must have tokens, and only those of the tokenizer")
        return Encoded(tuple(prompt), "".join("c" if i in self.names else "o" for i in prompt))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, structural tokens spelled out."""
        return self.full.decode(list(ids), skip_special_tokens=False)


def map_strings(value: Any, change: Callable[[str], str], keys: Callable[[str], str]) -> Any:
    """A JSON value with every string changed."""
    if isinstance(value, dict):
        return {keys(str(k)): map_strings(v, change, keys) for k, v in value.items()}
    if isinstance(value, list):
        return [map_strings(v, change, keys) for v in value]
    return change(value) if isinstance(value, str) else value


def _kinds(encoding: Encoding, edges: list[tuple[int, str]]) -> str:
    """One letter per id; a token that straddles an edge belongs to the side where it starts."""
    tokens = range(len(encoding))  # asked one by one: a list of all offsets would stall the loop

    def start(token: int) -> int:
        return (encoding.token_to_chars(token) or (0, 0))[0]

    cuts = [*(bisect_left(tokens, at, key=start) for at, _ in edges), len(tokens)]
    return "".join(k * (b - a) for (_, k), a, b in zip(edges, cuts[:-1], cuts[1:], strict=True))


def escape(text: str) -> str:
    """Text in which marks of ours stand for nothing."""
    if text.isascii() or not any(mark in text for mark in MARKS):  # far faster than to search all
        return text
    return _MARKS.sub(lambda m: ESCAPE + "abcdefgh"[ord(m[0]) - 0xFDD0], text)


def clean(text: str) -> str:
    """The inverse of `escape`; breaks are gone."""
    return _STRIP.sub(lambda m: chr(0xFDD0 + ord(m[1]) - ord("a")) if m[1] else "", text)


def _longest_first(tokens: Iterable[str]) -> str:
    return "|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)"


def _starts(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches the first character of every spelling, overlapping ones too."""
    rests = {c: [t[1:] for t in tokens if t[0] == c] for c in {t[0] for t in tokens}}
    firsts = [f"{re.escape(c)}(?={_longest_first(r)})" for c, r in rests.items()]
    return re.compile("|".join(firsts) or r"(?!)")


def _renamed(spec: dict, names: dict[str, str]) -> dict:
    """The same tokenizer with other spellings: without some tokens, others would get new ids."""
    added = [{**t, "content": names.get(t["content"], t["content"])} for t in spec["added_tokens"]]
    model = dict(spec["model"])
    vocab, unknown = model.get("vocab"), model.get("unk_token")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(t, t): i for t, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(t, t), score] for t, score in vocab]
    model |= {"unk_token": names.get(unknown, unknown)} if unknown else {}
    if merges := model.get("merges"):  # a merge would make what is renamed
        model["merges"] = [m for m in merges if names.keys().isdisjoint((*m, "".join(m)))]
    return {**spec, "post_processor": None, "added_tokens": added, "model": model}
