"""OpenAI Chat Completions, streamed and whole.

In: a request body. Out: a `Request` of wire-normal messages, and the frames or the body of the
reply, in `n` choices, with logprobs where wanted. What would constrain the sampling (forced tool
choice, response format) is recorded and not obeyed. Refuses (BadRequest) continuing an assistant
message, and logprobs of what was not sampled.
"""

from typing import Any

from nanoswe_proxy import dialects, wire
from nanoswe_proxy.dialects import Request
from nanoswe_proxy.errors import BadRequest
from nanoswe_proxy.render.types import Delta

MAX_CHOICES = 128
RECORDED = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "model", "n",
            "tool_choice", "response_format", "stop", "logprobs")  # fmt: skip


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    body = wire.loads(raw)
    if type(body.get("logprobs") or False) is not bool or body.get("top_logprobs"):
        raise BadRequest("logprobs must be true or false, top_logprobs 0: only sampled ones exist")
    return finish(body, body.get("messages"), body.get("tools"), RECORDED)


def finish(body: dict, messages: Any, tools: Any, recorded: tuple) -> Request:
    """The request whose messages and tools are in chat form by now."""
    asked = asked_of(body, recorded)
    normal = wire.normalise(messages)
    if normal[-1]["role"] == "assistant":
        raise BadRequest("the last message is an assistant's: continuing a reply is not supported")
    return Request(normal, wire.check_tools(tools), **asked)


def asked_of(body: dict, recorded: tuple) -> dict[str, Any]:
    """What a request says beside its prompt; all dialects come by here."""
    requested = {k: v for k in recorded if (v := body.get(k)) not in (None, "", "auto")}
    for key in ("max_tokens", "max_completion_tokens", "n"):
        value = requested.get(key, 1)
        if type(value) is not int or value < 1:
            raise BadRequest(f"{key} must be a positive integer")
    if (n := requested.get("n", 1)) > MAX_CHOICES:
        raise BadRequest(f"n must be at most {MAX_CHOICES}")
    if stop := requested.pop("stop", None):
        requested["stop"] = stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise BadRequest("stop must be text or a list of texts")
    usage = isinstance(o := body.get("stream_options"), dict) and bool(o.get("include_usage"))
    return {"requested": requested, "stream": bool(body.get("stream")), "usage": usage, "n": n}


class Stream(dialects.Stream):
    """See `dialects.Stream`; this protocol's blocks have neither beginning nor end."""

    name, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def start(self) -> bytes:
        self.messages: list[dict] = [{"role": "assistant", "content": ""} for _ in self.calls]
        return b"".join(self._chunk(i, message) for i, message in enumerate(self.messages))

    def delta(self, delta: Delta, choice: int = 0) -> bytes:
        message = self.messages[choice]
        calls = message.get("tool_calls", [])
        if delta.kind == "call_name":
            function = {"name": delta.text, "arguments": ""}
            call_id = self.ours("call", delta.index, choice)
            call = {"id": call_id, "type": "function", "function": function}
            message |= {"tool_calls": [*calls, call], "content": message["content"] or None}
            return self._chunk(choice, {"tool_calls": [{"index": delta.index, **call}]})
        if delta.kind == "call_args":
            calls[delta.index]["function"]["arguments"] += delta.text
            part = {"index": delta.index, "function": {"arguments": delta.text}}
            return self._chunk(choice, {"tool_calls": [part]})
        key = "content" if delta.kind == "content" else "reasoning_content"
        message[key] = (message.get(key) or "") + delta.text
        return self._chunk(choice, {key: delta.text})

    def end(self) -> bytes:
        ends = ((i, call.node.finish_reason) for i, call in enumerate(self.calls))
        frames = b"".join(self._chunk(i, {}, finish) for i, finish in ends)
        if self.request.usage:
            frames += dialects.sse(self._body(self.chunk, []) | self._usage())
        return frames + b"data: [DONE]\n\n"

    def whole(self) -> dict:
        told = zip(self.messages, self.calls, strict=True)
        choices = [self._choice(i, {"message": message}, call.node.finish_reason)
                   for i, (message, call) in enumerate(told)]  # fmt: skip
        return self._body(self.kind, choices) | self._usage()

    def _choice(self, choice: int, said: dict, finish: str | None) -> dict:
        wanted = self.request.requested.get("logprobs")
        logged = {"logprobs": {"content": self._fresh(choice)}} if wanted else {}
        return {"index": choice, **said, "finish_reason": finish, **logged}

    def _fresh(self, choice: int) -> list[dict]:
        """The tokens that were sampled since the last time."""
        call, at, told = self.calls[choice], self.told[choice], []
        codec, ids, logprobs = call.reader.codec, call.node.ids[at:], call.node.logprobs[at:]
        for token, logprob in zip(ids, logprobs, strict=True):
            first = self.told[choice] == 0
            spelled = codec.names.get(token, "").encode() or codec.spell(token, first=first)
            try:
                name = spelled.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{b:02x}" for b in spelled)
            told += [{"token": name, "logprob": logprob, "bytes": [*spelled], "top_logprobs": []}]
            self.told[choice] += 1
        return told

    def _chunk(self, choice: int, delta: dict, finish: str | None = None) -> bytes:
        if not self.request.stream:
            return b""
        piece = self._choice(choice, {"delta": delta}, finish)
        return dialects.sse(self._body(self.chunk, [piece]))

    def _body(self, kind: str, choices: list) -> dict:
        return {"id": f"{self.name}-{self.cap[:6]}-{self.node.index}", "object": kind,
                "created": self.node.created, "model": self.model, "choices": choices}  # fmt: skip

    def _usage(self) -> dict:
        prompt, sampled = self.prompt_tokens, sum(len(call.node.ids) for call in self.calls)
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": sampled,
                          "total_tokens": prompt + sampled}}  # fmt: skip
