"""ChatML with Hermes tool calls: Qwen2.5, Qwen3 and every template that agrees with the grammar
below.

In: a folder with tokenizer.json and, if it has one, chat_template.jinja (else
tokenizer_config.json's, else our own). Out: a Renderer. The template renders the preamble (system
and tools); turns are written by the grammar, which a witness conversation compares with the
template at load. Refuses (RenderError) a folder whose template disagrees.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanoswe_proxy.errors import RenderError
from nanoswe_proxy.parse import HERMES, Reader, fold
from nanoswe_proxy.render.base import Encoded, Message, Parsed
from nanoswe_proxy.render.codec import Codec
from nanoswe_proxy.trajectory import Provenance

START, END = "<|im_start|>", "<|im_end|>"
PROMPT = f"{START}assistant\n"
SAMPLED, SCAFFOLD, OBSERVED = Provenance.SAMPLED, Provenance.SCAFFOLD, Provenance.OBSERVED
FOREIGN, REPLAYED, SYNTHETIC = Provenance.FOREIGN, Provenance.REPLAYED, Provenance.SYNTHETIC


class ChatMLRenderer:
    """See `render.base.Renderer`."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self.codec = Codec(folder)
        missing = [t for t in (START, END) if t not in self.codec.structural]
        if missing:
            raise RenderError(f"{folder}/tokenizer.json has no special token {missing[0]}")
        self.end_id = self.codec.structural[END]
        also = [self.codec.structural[t] for t in ("<|endoftext|>",) if t in self.codec.structural]
        self.stop_ids = (self.end_id, *also)
        self._template = _environment().from_string(_template_text(folder))
        self._preamble = lru_cache(maxsize=64)(self._render_preamble)
        self._witness()

    def root(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict] | None,
        replay: Mapping[int, Sequence[int]],
    ) -> Encoded:
        lead, rest = self._lead(messages, tools)
        skipped = len(messages) - len(rest)
        moved = {i - skipped: ids for i, ids in replay.items()}
        return _join(self._extend(rest, lead, moved))

    def tail(
        self,
        messages: Sequence[Message],
        last: Sequence[int],
        replay: Mapping[int, Sequence[int]],
        history: Sequence[Message] = (),
        tools: Sequence[dict] | None = None,
    ) -> Encoded:
        return _join([self._close(last), *self._extend(messages, "\n", replay)])

    def reader(self, tools: Sequence[dict] | None = None) -> Reader:
        return Reader(self.codec, HERMES, self.stop_ids)

    def parse(
        self, ids: Sequence[int], truncated: bool, tools: Sequence[dict] | None = None
    ) -> Parsed:
        return fold(self.reader(tools), ids, truncated)

    def render_messages(
        self, messages: Sequence[Message], tools: Sequence[dict] | None = None
    ) -> list[Encoded]:
        lead, rest = self._lead(messages, tools)
        rendered = []
        for i, marked in self._layout(rest, lead):
            outside, inside = (SCAFFOLD, OBSERVED) if i is None else (SAMPLED, SAMPLED)
            rendered.append(self.codec.encode(marked, outside, inside))
        return rendered

    def _extend(
        self, messages: Sequence[Message], lead: str, replay: Mapping[int, Sequence[int]]
    ) -> Iterator[Encoded]:
        for i, text in self._layout([*messages, {"role": "assistant"}], lead):
            if i == len(messages):
                return  # the body of the turn that is about to be sampled
            if i is None:
                yield self.codec.encode(text, SCAFFOLD, OBSERVED)
            elif i in replay:
                yield Encoded(tuple(replay[i]), REPLAYED * len(replay[i]))
                yield self._close(replay[i])
            else:
                yield self.codec.encode(text, FOREIGN, FOREIGN)

    def _close(self, sampled: Sequence[int]) -> Encoded:
        closed = bool(sampled) and sampled[-1] == self.end_id
        return Encoded((), "") if closed else Encoded((self.end_id,), SYNTHETIC)

    def _layout(self, messages: Sequence[Message], lead: str) -> Iterator[tuple[int | None, str]]:
        """Marked text in stretches: (None, context up to a generation prompt), (i, body of
        assistant i), ...

        A stretch begins and ends at a structural token, or where generation starts: encoding them
        apart is exact.
        """
        text = lead
        for i, message in enumerate(messages):
            role = message["role"]
            if role == "assistant":
                yield None, text + PROMPT
                yield i, self._body(message) + END
                text = "\n"
            elif role == "tool":
                first = i == 0 or messages[i - 1]["role"] != "tool"
                last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
                text += f"{START}user\n" if first else "\n"
                text += f"<tool_response>\n{self.codec.guard(message['content'])}\n</tool_response>"
                text += f"{END}\n" if last else ""
            else:
                text += f"{START}{role}\n{self.codec.guard(message['content'])}{END}\n"
        if text != "\n":
            yield None, text

    def _body(self, message: Message) -> str:
        parts = [self.codec.defuse(message.get("content") or "", tags=True)]
        for call in message.get("calls") or ():
            name, arguments = self.codec.defuse(call["name"]), self._arguments(call["arguments"])
            parts.append(
                f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            )
        return "\n".join(p for p in parts if p)

    def _arguments(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            return self.codec.defuse(text)
        return json.dumps(_map_strings(value, self.codec.guard), ensure_ascii=False)

    def _lead(
        self, messages: Sequence[Message], tools: Sequence[dict] | None
    ) -> tuple[str, Sequence[Message]]:
        """The preamble as marked text, and the messages that it does not cover."""
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        lead = self._preamble(system, json.dumps(tools, ensure_ascii=False) if tools else "")
        return lead, messages[0 if system is None else 1 :]

    def _render_preamble(self, system: str | None, tools_json: str) -> str:
        probe = [{"role": "user", "content": "probe"}]
        if system is not None:
            probe.insert(0, {"role": "system", "content": self.codec.guard(system)})
        tools = _map_strings(json.loads(tools_json), self.codec.defuse) if tools_json else None
        text = self._render(probe, tools)
        suffix = f"{START}user\nprobe{END}\n{PROMPT}"
        if not text.endswith(suffix):
            raise RenderError(f"the chat template is not ChatML: it ends {text[-60:]!r}")
        return text.removesuffix(suffix)

    def _render(self, messages: list[dict], tools: Any) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
            )
        except TemplateError as error:
            raise RenderError(f"the chat template refused: {error}") from error

    def _witness(self) -> None:
        """Grammar and template must write the same text for every kind of message."""
        call = {"name": "bash", "arguments": {"command": 'echo "é"\n'}}
        wire: list[dict] = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "content": "d"},
            {"role": "tool", "content": "e"},
            {"role": "user", "content": "f"},
        ]
        normal: list[dict] = [dict(m) for m in wire]
        normal[4]["calls"] = [{"name": "bash", "arguments": json.dumps(call["arguments"])}]
        lead, rest = self._lead(normal, None)
        ours = self.codec.decode(_join(self._extend(rest, lead, {})).ids)
        theirs = self._render(wire, None)
        if ours != theirs:
            raise RenderError(f"the chat template writes {theirs!r}, this renderer {ours!r}")


def _join(parts: Iterable[Encoded]) -> Encoded:
    ids: list[int] = []
    provenance = ""
    for part in parts:
        ids += part.ids
        provenance += part.provenance
    return Encoded(tuple(ids), provenance)


def _map_strings(value: Any, change: Any) -> Any:
    match value:
        case str():
            return change(value)
        case list():
            return [_map_strings(v, change) for v in value]
        case dict():
            return {k: _map_strings(v, change) for k, v in value.items()}
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as model folders expect it: the settings of transformers' `apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _template_text(folder: Path) -> str:
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if config.is_file():
        template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            return template
    return Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
