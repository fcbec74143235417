"""A model folder's chat template, rendered as transformers' `apply_chat_template` renders it.

In: a folder with chat_template.jinja, or with one or more templates in tokenizer_config.json, or
with none (then ours for ChatML). Out: text. Refuses (TemplateRefused) what the template refuses,
and (RenderError) what is no Jinja. Its "now" is when it was loaded.
"""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanoswe_proxy.errors import RenderError, TemplateRefused

# What assistants say, marked for masks that are not made here: a block that does nothing.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")


class Template:
    """Renders messages. `source` is the text of the template."""

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "tokenizer_config.json")
        sources = _sources(folder, config.get("chat_template"))
        self.source = "\n".join(sources.values())
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        plain = {"ensure_ascii": False}
        environment.filters["tojson"] = lambda x, **how: json.dumps(x, **(plain | how))
        now = datetime.now().strftime
        environment.globals |= {"raise_exception": _refuse, "strftime_now": now}
        try:
            self._templates = {k: environment.from_string(v) for k, v in sources.items()}
        except TemplateSyntaxError as error:
            raise RenderError(f"the chat template of {folder} is no Jinja: {error}") from error
        tokens = {k: v for k, v in config.items() if k.endswith("_token")}
        spelled = {k: v["content"] if isinstance(v, dict) else v for k, v in tokens.items()}
        named = {k: v for k, v in spelled.items() if isinstance(v, str)}
        self._variables = {"bos_token": "", "eos_token": "", **named}

    def render(self, messages: Sequence[dict], tools: Sequence[dict] | None, prompt: bool) -> str:
        """The text of a conversation; `prompt`: and of the beginning of a reply."""
        chosen = "tool_use" if tools and "tool_use" in self._templates else "default"
        given = {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return self._templates[chosen].render(
                **(self._variables | given), add_generation_prompt=prompt
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefused(f"the chat template refused: {error}") from error


def _sources(folder: Path, configured: Any) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file() or not configured:
        file = file if file.is_file() else Path(__file__).with_name("chatml.jinja")
        configured = file.read_text(encoding="utf-8")
    found = {"default": configured}
    if isinstance(configured, list):
        found = {t["name"]: t["template"] for t in configured}
    return {k: _GENERATION.sub(lambda m: m[1] + ("endif" if m[2] else "if true"), v)
            for k, v in found.items()}  # fmt: skip


def read_json(file: Path) -> dict:
    """The object in `file`, if there is one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise RenderError(f"{file} is no JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _refuse(message: str) -> None:
    raise TemplateError(message)
