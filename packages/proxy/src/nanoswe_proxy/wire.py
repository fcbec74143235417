"""The wire-normal form of messages, in which requests are compared, rendered and remembered.

In: OpenAI chat `messages` and `tools` (other dialects convert to them first). Out: plain dicts:
role, content (text), for assistants `reasoning`, `calls` (name, canonical JSON arguments, id) and
`echo` (other ids of ours that came back), for tools `call_id`. null, "" and missing are one; text
parts are joined; cache markers, unknown keys and declared noise are gone. Refuses (BadRequest) what
it cannot carry exactly: images, unknown roles.
"""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from pydantic_core import from_json

from nanoswe_proxy.errors import BadRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
         "tool": "tool", "function": "tool"}  # fmt: skip
AS_SERVED, NORMAL, LOSSY, DIFFERENT = range(4)  # the ladder: L0, L1, L2 and no match
# A line that one client writes at the front of its system prompt, new in every request.
NOISE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def loads(raw: bytes) -> dict:
    """The JSON object in a request body."""
    try:
        body = from_json(raw, cache_strings="keys", allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def normalise(messages: Any) -> list[dict]:
    """Wire-normal messages; tool results stand in the order of the calls that they answer."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    return _pair([_message(m, i) for i, m in enumerate(messages)])


def level_of(known: dict, sent: dict, echoed: bool = False) -> int:
    """How well `sent` repeats `known`. `echoed`: an id of ours says that it does.

    NORMAL: equal but for ids and key order. LOSSY: what agents are known to do: trim, drop the
    reasoning; repair broken arguments and fill in defaults, if an id vouches for the call.
    """
    if known == sent:
        return AS_SERVED
    if known["role"] != sent["role"]:
        return DIFFERENT
    level = NORMAL
    for key in ("content", "reasoning"):
        a, b = known.get(key, ""), sent.get(key, "")
        if a != b:
            if a.strip() != b.strip() and (b or key == "content"):
                return DIFFERENT
            level = LOSSY
    mine, theirs = known.get("calls", ()), sent.get("calls", ())
    if [c["name"] for c in mine] != [c["name"] for c in theirs]:
        return DIFFERENT
    for a, b in zip(mine, theirs, strict=True):
        if _value(a["arguments"]) != _value(b["arguments"]):
            said, back = (_value(c["arguments"], bare=True) for c in (a, b))
            if not echoed or said not in (a["arguments"], back):
                return DIFFERENT
            level = LOSSY
    return level


def level_of_all(known: Sequence[dict], sent: Sequence[dict]) -> int:
    """The same for a stretch; clients may merge neighbouring user messages, or split them."""
    if known == sent:
        return AS_SERVED
    floor = AS_SERVED if len(known) == len(sent) else LOSSY
    if floor:
        known, sent = _folded(known), _folded(sent)
        if len(known) != len(sent):
            return DIFFERENT
    return max([floor, *(level_of(a, b) for a, b in zip(known, sent, strict=True))])


def text_key(message: dict) -> int:
    """Equal for messages that may be the same reply."""
    return hash((message["content"].strip(), *(c["name"] for c in message.get("calls", ()))))


def check_tools(tools: Any) -> list[dict] | None:
    """The tool list, or None for none."""
    said = tools if isinstance(tools or [], list) else [None]
    functions = [t.get("function", t) if isinstance(t, dict) else None for t in said or ()]
    schemas = [f.get("parameters") or {} if isinstance(f, dict) else None for f in functions]
    found = [s.get("properties") or {} if isinstance(s, dict) else None for s in schemas]
    if not all(isinstance(properties, dict) for properties in found):
        raise BadRequest("tools must be a list of objects with JSON schemas as parameters")
    return tools or None


def canonical_json(arguments: Any) -> str:
    """Arguments with the default separators, in the given order; what is not JSON stays."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        return str(arguments)
    return json.dumps(value, ensure_ascii=False)


def _message(message: Any, i: int) -> dict:
    if not isinstance(message, dict):
        raise BadRequest(f"messages[{i}] must be an object")
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise BadRequest(f"messages[{i}].role {message.get('role')!r} is not one of {list(ROLES)}")
    text = text_of(message.get("content"), f"messages[{i}]")
    normal: dict = {"role": role, "content": NOISE.sub("", text) if role == "system" else text}
    if role == "tool":
        normal["call_id"] = str(message.get("tool_call_id") or "")
    if role == "assistant":
        thought = message.get("reasoning_content") or message.get("reasoning")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise BadRequest(f"messages[{i}].tool_calls must be a list")
        normal |= {"reasoning": thought} if isinstance(thought, str) else {}
        normal |= {"calls": [_call(c, i) for c in calls]} if calls else {}
        normal |= {"echo": str(message["echo"])} if message.get("echo") else {}
    return normal


def text_of(content: Any, where: str) -> str:
    """The text of content that may be nothing, text, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = content if isinstance(content, list) else [content]
    texts = [b.get("text") if isinstance(b, dict) else None for b in blocks]
    if not all(isinstance(t, str) for t in texts):
        raise BadRequest(f"{where}.content must be text: this model sees nothing else")
    return "".join(map(str, texts))


def _call(call: Any, i: int) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"messages[{i}].tool_calls: each needs function.name")
    arguments = canonical_json(function.get("arguments"))
    return {"name": function["name"], "arguments": arguments, "id": str(call.get("id") or "")}


def _value(arguments: str, bare: bool = False) -> str:
    """JSON in a spelling of its own, if `bare` without what says nothing; broken JSON as it is."""
    try:
        value = json.loads(arguments)
        if bare and isinstance(value, dict):
            value = {k: v for k, v in value.items() if v not in (None, "") and v is not False}
        return " " + json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _folded(messages: Sequence[dict]) -> list[dict]:
    out: list[dict] = []
    for m in messages:
        user = m["role"] == "user"
        text = out.pop()["content"] + " " if user and out and out[-1]["role"] == "user" else ""
        out.append(m | {"content": " ".join((text + m["content"]).split())} if user else m)
    return out


def _pair(messages: list[dict]) -> list[dict]:
    """Parallel results may come in any order; templates that show no ids pair them by place."""
    out: list[dict] = []
    for tool, group in groupby(messages, lambda m: m["role"] == "tool"):
        run, calls = list(group), out[-1].get("calls", ()) if out else ()
        rank = {c["id"]: n for n, c in enumerate(calls)}
        ids = {m["call_id"] for m in run} if tool else set()
        if len(ids) == len(run) and ids <= set(rank):
            run.sort(key=lambda m: rank[m["call_id"]])
        out += run
    return out
