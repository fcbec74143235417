"""The wire-normal form of OpenAI chat messages, in which requests are compared, rendered and
remembered.

In: the `messages` and `tools` of a request body. Out: plain dicts: role, content (text), and for
assistants `calls` (name, canonical JSON arguments, id), for tools `call_id`. null, "" and missing
content are one; text parts are joined; cache markers and unknown keys are gone. Refuses
(BadRequest) what it cannot carry exactly: images, unknown roles.
"""

import json
from collections.abc import Sequence
from typing import Any

from nanoswe_proxy.errors import BadRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
         "tool": "tool"}  # fmt: skip


def normalise(messages: Any) -> list[dict]:
    """Wire-normal messages; tool results stand in the order of the calls that they answer."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    return _pair([_message(m, i) for i, m in enumerate(messages)])


def normalise_one(message: dict) -> dict:
    """One message by itself: how a reply will look when a client sends it back."""
    return _message(message, 0)


def same(a: dict, b: dict) -> bool:
    """L1: equal but for tool-call ids, which a client may rename."""
    return a == b or _bare(a) == _bare(b)


def check_tools(tools: Any) -> list[dict] | None:
    """The tool list, or None for none."""
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
    ):
        raise BadRequest("tools must be a list of objects")
    return tools or None


def _message(message: Any, i: int) -> dict:
    if not isinstance(message, dict):
        raise BadRequest(f"messages[{i}] must be an object")
    role = ROLES.get(message.get("role") or "")
    if role is None:
        raise BadRequest(f"messages[{i}].role {message.get('role')!r} is not one of {list(ROLES)}")
    normal: dict = {"role": role, "content": _text(message.get("content"), i)}
    if role == "tool":
        normal["call_id"] = str(message.get("tool_call_id") or "")
    calls = message.get("tool_calls") or []
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise BadRequest(f"messages[{i}].tool_calls must be a list")
        normal["calls"] = [_call(c, i) for c in calls]
    return normal


def _text(content: Any, i: int) -> str:
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in content
    ):
        text = "".join(p["text"] for p in content)
    else:
        raise BadRequest(f"messages[{i}].content must be text: this model sees nothing else")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"messages[{i}].content holds half a character: {error.reason}") from error
    return text


def _call(call: Any, i: int) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"messages[{i}].tool_calls: each needs function.name")
    return {
        "name": function["name"],
        "arguments": canonical_json(function.get("arguments")),
        "id": str(call.get("id") or ""),
    }


def canonical_json(arguments: Any) -> str:
    """Arguments with the default separators, in the given order; what is not JSON stays."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    except ValueError:
        return str(arguments)
    return json.dumps(value, ensure_ascii=False)


def _bare(message: dict) -> tuple:
    calls = message.get("calls") or ()
    return (
        message["role"],
        message["content"],
        [(c["name"], _value(c["arguments"])) for c in calls],
    )


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)  # key order is no difference
    except ValueError:
        return arguments


def _pair(messages: list[dict]) -> list[dict]:
    """Parallel results may come in any order, but ChatML shows no ids: put them in call order."""
    out: list[dict] = []
    i = 0
    while i < len(messages):
        end = i + 1
        if messages[i]["role"] == "tool":
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            out += _in_call_order(messages[i:end], out[-1].get("calls", ()) if out else ())
        else:
            out.append(messages[i])
        i = end
    return out


def _in_call_order(results: list[dict], calls: Sequence[dict]) -> list[dict]:
    rank = {c["id"]: n for n, c in enumerate(calls)}
    ids = [r["call_id"] for r in results]
    if len(set(ids)) < len(ids) or any(i not in rank for i in ids):
        return results
    return sorted(results, key=lambda r: rank[r["call_id"]])
