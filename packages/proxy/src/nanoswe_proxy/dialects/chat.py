"""OpenAI Chat Completions, not streamed.

In: a request body. Out: a `Request` of wire-normal messages; for a finished generation, the
response bytes. Refuses (BadRequest) what would change the sampling without a record: streaming, n >
1, stop strings, forced tool choice, constrained output, and continuing an assistant message.
"""

import json
import time
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from nanoswe_proxy import wire
from nanoswe_proxy.errors import BadRequest
from nanoswe_proxy.tree import Generation

RECORDED = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "model")


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    messages: list[Any]
    model: str = ""
    tools: list[Any] | None = None
    stream: bool | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    tool_choice: Any = None
    response_format: dict | None = None


@dataclass(frozen=True)
class Request:
    """A chat call, wire-normal. `requested` holds the sampling values that the agent asked for."""

    messages: list[dict]
    tools: list[dict] | None
    requested: dict
    model: str


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    try:
        body = _Body.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"]) or "body"
        raise BadRequest(f"{where}: {first['msg']}") from error
    _check(body)
    messages = wire.normalise(body.messages)
    if messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is an assistant's: continuing a reply is not supported")
    requested = {k: v for k in RECORDED if (v := getattr(body, k)) not in (None, "")}
    return Request(messages, wire.check_tools(body.tools), requested, body.model)


def _check(body: _Body) -> None:
    if body.stream:
        raise BadRequest("stream=true is not supported by this version: send stream=false")
    if body.n not in (None, 1):
        raise BadRequest("n must be 1: send the request again for another sample")
    if body.stop:
        raise BadRequest("stop strings are not supported: a turn ends at the model's own end token")
    if body.tool_choice not in (None, "auto"):
        raise BadRequest("tool_choice must be auto: sampling is not constrained here")
    if body.response_format and body.response_format.get("type") != "text":
        raise BadRequest("response_format must be text: sampling is not constrained here")


def response(cap: str, model: str, node: Generation, message: dict, prompt_tokens: int) -> bytes:
    """The response body of a committed generation."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(node.ids),
        "total_tokens": prompt_tokens + len(node.ids),
    }
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": node.finish_reason,
        "logprobs": None,
    }
    body = {
        "id": f"chatcmpl-{cap[:6]}-{node.index}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return json.dumps(body, ensure_ascii=False).encode()
