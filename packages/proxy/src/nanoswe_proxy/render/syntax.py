"""How a template writes tool calls, learned from what it writes: the grammar for reading replies.

In: a reply with a probing call. Out: a `Grammar`. Known are XML-like calls (Qwen3-Coder, GLM) and
JSON objects between tags or alone (Hermes, Qwen, Llama, Mistral). Refuses (RenderError) others.
"""

import json
import re
from typing import Any

from nanoswe_proxy.errors import RenderError
from nanoswe_proxy.parse import Grammar
from nanoswe_proxy.render.types import Call, Tools

NAME, ID, ARGUMENTS = "probe_fn", "prb123456", {"key": "value"}
NO_CALLS = Grammar((), "", lambda text, tools: None)
_PYTHON = {"True": True, "False": False, "None": None}
_BARE = {  # arguments as bare text: a call, and one of its arguments
    "<function=": (r"\s*<function=([^<>\n]+)>(.*)</function>\s*",
                   r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*"),
    "<arg_key>": (r"\s*([^<>\n]+?)\s*(<arg_key>.*|)",
                  r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"),
}  # fmt: skip


def learn(one: str) -> Grammar:
    """The grammar of replies that carry `NAME(ARGUMENTS)` as `one` does."""
    for mark in _BARE:
        if mark in one:
            return _bare_grammar(mark, "<tool_call>" in one)
    for match in re.finditer(r"\{", one):
        value, end = _decode(one, match.start())
        if isinstance(value, dict) and NAME in value.values():
            name, own = (next((k for k, v in value.items() if v == x), "") for x in (NAME, ID))
            key = next((k for k, v in value.items() if "value" in str(v)), "")
            opening = one[: match.start()].lstrip().rstrip(" \n[")
            close = one[end:].lstrip(" \n]").rstrip()
            return _json_grammar(opening, close, name, key, own)
    raise RenderError(f"no known syntax reads the template's tool calls: {one!r}")


def _json_grammar(opening: str, close: str, name: str, key: str, own: str) -> Grammar:
    """Calls are JSON objects, one or a list, or with semicolons between them."""

    def read(text: str, tools: Tools) -> list[Call] | None:
        text, calls = text.strip().removeprefix("<|python_tag|>").removeprefix(opening), []
        text = text.removesuffix(close).strip()
        while text:
            value, end = _decode(text, 0)
            if end == 0:
                return None
            text = text[end:].lstrip("; \n")
            for call in value if isinstance(value, list) else [value]:
                arguments = call.get(key) if isinstance(call, dict) else None
                if isinstance(arguments, str):
                    arguments, _ = _decode(arguments, 0)
                if not isinstance(arguments, dict) or not isinstance(call.get(name), str):
                    return None
                spelled = json.dumps(arguments, ensure_ascii=False)
                calls.append(Call(call[name], spelled, str(call.get(own) or "")))
        return calls or None

    opens = (opening,) if opening else ("<|python_tag|>", "{")
    return Grammar(opens, close, read, anchored=not opening)


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _bare_grammar(mark: str, tagged: bool) -> Grammar:
    """Arguments are JSON where the tool's schema does not say string."""
    whole, pair = (re.compile(p, re.DOTALL) for p in _BARE[mark])
    opening, close = ("<tool_call>", "</tool_call>") if tagged else (mark, "</function>")

    def read(text: str, tools: Tools) -> list[Call] | None:
        match = whole.fullmatch(text[len(opening) : -len(close)] if tagged else text)
        if not match or pair.sub("", match[2]).strip():
            return None
        name, arguments, types = match[1].strip(), {}, _types(tools)
        for key, value in pair.findall(match[2]):
            typed = _PYTHON[value] if value in _PYTHON else _decode(value, 0)[0]
            text_like = types.get((name, key.strip()), "string") == "string"
            kept = text_like or (typed is None and value not in ("null", "None"))
            arguments[key.strip()] = value if kept else typed
        return [Call(name, json.dumps(arguments, ensure_ascii=False))]

    return Grammar((opening,), close, read)


def _types(tools: Tools) -> dict[tuple[str, str], str]:
    """(tool, argument) → JSON type."""
    functions = [t.get("function") or t for t in tools or ()]
    return {
        (f.get("name", ""), key): schema.get("type", "any") if isinstance(schema, dict) else "any"
        for f in functions
        for key, schema in ((f.get("parameters") or {}).get("properties") or {}).items()
    }
