"""OpenAI Responses, streamed and whole, without a store of its own: the input is the history.

In: a request body. Out: a `Request`, and the events or the body of the reply. Item ids and
`encrypted_content` are ids of ours, which say whose an item is when it comes back. Tools that are
no functions are left out. Refuses (BadRequest) previous_response_id, images and files.
"""

from typing import Any

from nanoswe_proxy import wire
from nanoswe_proxy.dialects import Request, blocks, chat
from nanoswe_proxy.errors import BadRequest

RECORDED = ("temperature", "top_p", "max_tokens", "model", "tool_choice", "reasoning", "text")


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    body = wire.loads(raw)
    if body.get("previous_response_id"):
        raise BadRequest("previous_response_id is not kept: send the whole input (store=false)")
    given, system = body.get("input") or [], body.get("instructions")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": "system", "content": system}] if system else []
    if not isinstance(items, list):
        raise BadRequest("input must be text or a list of items")
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    said = ("name", "description", "parameters")
    tools = [
        {"type": "function", "function": {k: t.get(k) for k in said}}
        for t in wire.check_tools(body.get("tools")) or []
        if t.get("type") == "function"
    ]
    body["max_tokens"] = body.get("max_output_tokens")
    return chat.finish(body, messages, tools, RECORDED)


def _add(messages: list[dict], item: Any, where: str) -> None:
    """One item more: the items of one reply are one assistant message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "function_call_output":
        said = wire.text_of(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        return
    role = item.get("role", "user") if kind == "message" else "assistant"
    if kind not in ("message", "function_call", "reasoning"):
        raise BadRequest(f"{where}: items of type {kind!r} are not supported")
    if role != "assistant":
        messages.append({"role": role, "content": item.get("content")})
        return
    if not messages or messages[-1]["role"] != "assistant":
        nothing = dict.fromkeys(("content", "reasoning", "echo"), "")
        messages.append({"role": role, "tool_calls": [], **nothing})
    last = messages[-1]
    last["echo"] += f" {item.get('id')} {item.get('encrypted_content')}"
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        last["tool_calls"].append({"id": item.get("call_id"), "function": function})
    else:
        said = wire.text_of(item.get("content"), where)
        last["reasoning" if kind == "reasoning" else "content"] += said


class Stream(blocks.Stream):
    """See `blocks.Stream`."""

    shapes = blocks.SHAPES["responses"]

    def facts(self) -> dict[str, Any]:
        ended = "incomplete" if self.node.finish_reason == "length" else "completed"
        status = "failed" if self.failed else ended if self.ended else "in_progress"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        failed = self.failed and {"code": self.failed.code, "message": str(self.failed)}
        return {"$status": status, "$ended": f"response.{ended}", "$details": cut, "$error": failed}
