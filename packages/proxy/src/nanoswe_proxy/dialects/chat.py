"""OpenAI Chat Completions, streamed and whole.

In: a request body. Out: a `Request` of wire-normal messages, and the frames or the body of the
reply. What would constrain the sampling (forced tool choice, response format) is recorded and not
obeyed. Refuses (BadRequest) n > 1 and continuing an assistant message.
"""

from typing import Any

from nanoswe_proxy import dialects, wire
from nanoswe_proxy.dialects import Request
from nanoswe_proxy.errors import BadRequest
from nanoswe_proxy.render.types import Delta

RECORDED = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "model",
            "tool_choice", "response_format", "stop")  # fmt: skip


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    body = wire.loads(raw)
    if body.get("n") not in (None, 1):
        raise BadRequest("n must be 1: send the request again for another sample")
    usage = isinstance(o := body.get("stream_options"), dict) and bool(o.get("include_usage"))
    return finish(body, body.get("messages"), body.get("tools"), RECORDED, usage)


def finish(body: dict, messages: Any, tools: Any, recorded: tuple, usage: bool) -> Request:
    """The request whose messages and tools are in chat form by now; all dialects end here."""
    requested = {k: v for k in recorded if (v := body.get(k)) not in (None, "", "auto")}
    for key in ("max_tokens", "max_completion_tokens"):
        value = requested.get(key, 1)
        if type(value) is not int or value < 1:
            raise BadRequest(f"{key} must be a positive integer")
    if stop := requested.pop("stop", None):
        requested["stop"] = stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise BadRequest("stop must be text or a list of texts")
    normal = wire.normalise(messages)
    if normal[-1]["role"] == "assistant":
        raise BadRequest("the last message is an assistant's: continuing a reply is not supported")
    return Request(normal, wire.check_tools(tools), requested, bool(body.get("stream")), usage)


class Stream(dialects.Stream):
    """See `dialects.Stream`; this protocol's blocks have neither beginning nor end."""

    def start(self) -> bytes:
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}
        return self._chunk(self.message)

    def delta(self, delta: Delta) -> bytes:
        message, calls = self.message, self.message.get("tool_calls", [])
        if delta.kind == "call_name":
            function = {"name": delta.text, "arguments": ""}
            call = {"id": self.ours("call", delta.index), "type": "function", "function": function}
            message["tool_calls"] = [*calls, call]
            return self._chunk({"tool_calls": [{"index": delta.index, **call}]})
        if delta.kind == "call_args":
            calls[delta.index]["function"]["arguments"] += delta.text
            part = {"index": delta.index, "function": {"arguments": delta.text}}
            return self._chunk({"tool_calls": [part]})
        key = "content" if delta.kind == "content" else "reasoning_content"
        message[key] = message.get(key, "") + delta.text
        return self._chunk({key: delta.text})

    def end(self) -> bytes:
        frames = self._chunk({}, self.node.finish_reason)
        if self.request.usage:
            frames += self.sse(self._body("chat.completion.chunk", []))
        return frames + b"data: [DONE]\n\n"

    def whole(self) -> dict:
        if self.message.get("tool_calls"):
            self.message["content"] = self.message["content"] or None
        finish_reason = self.node.finish_reason
        choice = {"index": 0, "message": self.message, "finish_reason": finish_reason}
        return self._body("chat.completion", [choice])

    def _chunk(self, delta: dict, finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return self.sse(self._body("chat.completion.chunk", [choice]))

    def _body(self, kind: str, choices: list) -> dict:
        """A chunk with choices has no usage, all others do."""
        body = {"id": f"chatcmpl-{self.cap[:6]}-{self.node.index}", "object": kind,
                "created": self.node.created, "model": self.model, "choices": choices}  # fmt: skip
        if kind.endswith("chunk") and choices:
            return body
        prompt, sampled = self.prompt_tokens, len(self.node.ids)
        return body | {"usage": {"prompt_tokens": prompt, "completion_tokens": sampled,
                                 "total_tokens": prompt + sampled}}  # fmt: skip
