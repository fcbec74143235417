"""OpenAI Chat Completions, not streamed.

In: a request body. Out: a `Request` of wire-normal messages; for a finished generation, the
response bytes. Refuses (BadRequest) what would change the sampling without a record: streaming, n >
1, stop strings, forced tool choice, constrained output, and continuing an assistant message.
"""

import json
import time
from dataclasses import dataclass

from nanoswe_proxy import wire
from nanoswe_proxy.errors import BadRequest
from nanoswe_proxy.tree import Generation

RECORDED = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "model")


@dataclass(frozen=True)
class Request:
    """A chat call, wire-normal. `requested` holds the sampling values that the agent asked for."""

    messages: list[dict]
    tools: list[dict] | None
    requested: dict
    model: str


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    body = wire.loads(raw)
    for key in ("max_tokens", "max_completion_tokens"):
        if body.get(key) is not None and (type(body[key]) is not int or body[key] < 1):
            raise BadRequest(f"{key} must be a positive integer")
    _check(body)
    messages = wire.normalise(body.get("messages"))
    if messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is an assistant's: continuing a reply is not supported")
    requested = {k: v for k in RECORDED if (v := body.get(k)) not in (None, "")}
    model = str(body.get("model") or "")
    return Request(messages, wire.check_tools(body.get("tools")), requested, model)


def _check(body: dict) -> None:
    if body.get("stream"):
        raise BadRequest("stream=true is not supported by this version: send stream=false")
    if body.get("n") not in (None, 1):
        raise BadRequest("n must be 1: send the request again for another sample")
    if body.get("stop"):
        raise BadRequest("stop strings are not supported: a turn ends at the model's own end token")
    if body.get("tool_choice") not in (None, "auto"):
        raise BadRequest("tool_choice must be auto: sampling is not constrained here")
    if (body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise BadRequest("response_format must be text: sampling is not constrained here")


def response(cap: str, model: str, node: Generation, message: dict, prompt_tokens: int) -> bytes:
    """The response body of a committed generation."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(node.ids),
        "total_tokens": prompt_tokens + len(node.ids),
    }
    choice = {"index": 0, "message": message, "finish_reason": node.finish_reason}
    body = {
        "id": f"chatcmpl-{cap[:6]}-{node.index}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return json.dumps(body, ensure_ascii=False).encode()
