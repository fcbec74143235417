"""Hermes tool calls in sampled text: `<tool_call>\\n{"name": ..., "arguments":
{...}}\\n</tool_call>`.

In: the text of a generation. Out: content, calls and a parse status. Nothing is repaired and
nothing is lost: a reply with any malformed call is served whole, as content, with status
`malformed`.
"""

import json
import re

from nanoswe_proxy.render.base import Call, Parsed

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_hermes(text: str) -> Parsed:
    """The reply that `text` spells."""
    if "<tool_call>" not in text:
        return Parsed(text, (), "text")
    pieces = _CALL.split(text)
    outside = "".join(pieces[::2])
    calls = [_call(piece) for piece in pieces[1::2]]
    if "<tool_call>" in outside or "</tool_call>" in outside or None in calls:
        return Parsed(text, (), "malformed")
    return Parsed(outside.strip("\n"), tuple(c for c in calls if c), "calls")


def _call(text: str) -> Call | None:
    try:
        value = json.loads(text)
        name, arguments = value["name"], value["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))
