"""Anthropic Messages, streamed and whole, and what `count_tokens` counts.

In: a request body. Out: a `Request`, and the frames or the body of the reply. A thinking block is
signed with an id of ours, which says whose it is when it comes back. Server tools and thinking
budgets are recorded and not obeyed. Refuses (BadRequest) blocks that are not text: images, files.
"""

from collections.abc import Iterator
from typing import Any

from nanoswe_proxy import wire
from nanoswe_proxy.dialects import Request, blocks, chat
from nanoswe_proxy.errors import BadRequest, ProxyError

RECORDED = ("temperature", "top_p", "top_k", "max_tokens", "model", "tool_choice", "thinking",
            "stop")  # fmt: skip
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ROLES = {"user": "user", "assistant": "assistant", "system": "user"}  # a remark on the way
ERRORS = {404: "not_found_error", 413: "request_too_large", 500: "api_error", 502: "api_error"}


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    body = wire.loads(raw)
    body["stop"] = body.get("stop_sequences")
    system, given = body.get("system") or [], body.get("messages")
    blocks = system if isinstance(system, list) else [system]
    said = [b if isinstance(b, str) else wire.text_of(b, "system") for b in blocks]
    text = "\n\n".join(t for t in (wire.NOISE.sub("", b) for b in said) if t)
    messages = [{"role": "system", "content": text}] if text else []
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list with at least one message")
    for i, message in enumerate(given):
        if not isinstance(message, dict) or str(message.get("role")) not in ROLES:
            raise BadRequest(f"messages[{i}].role must be user or assistant")
        messages += _turns(message, f"messages[{i}]")
    tools = [
        {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"],
         "description": t.get("description", "")}}
        for t in wire.check_tools(body.get("tools")) or [] if "input_schema" in t and "name" in t
    ]  # fmt: skip
    return chat.finish(body, messages, tools, RECORDED)


def _turns(message: dict, where: str) -> Iterator[dict]:
    """The chat messages that one message stands for."""
    content, role = message.get("content") or "", ROLES[message["role"]]
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    texts: list[str] = []
    spoken: dict[str, Any] = {"role": role, "tool_calls": [], "reasoning": "", "echo": ""}
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            said = wire.text_of(block.get("content"), where)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            function = {"name": block["name"], "arguments": block.get("input")}
            spoken["tool_calls"].append({"id": block.get("id"), "function": function})
        elif kind in ("thinking", "redacted_thinking"):
            spoken["reasoning"] += str(block.get("thinking") or "")
            spoken["echo"] += f" {block.get('signature') or block.get('data')}"
        else:
            texts.append(wire.text_of(block, where))
    if role == "assistant" or texts:
        yield spoken | {"content": "".join(texts)}


class Stream(blocks.Stream):
    """See `blocks.Stream`."""

    shapes = blocks.SHAPES["messages"]

    def facts(self) -> dict[str, Any]:
        stop = STOPS[self.node.finish_reason] if self.ended else None
        cut = self.node.stop == "stop_string"
        failed = self.failed and error(self.failed)["error"]
        return {"$stop": "stop_sequence" if cut else stop, "$error": failed}


def error(error: ProxyError) -> dict:
    """The body that this dialect's clients read."""
    kind = ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
