"""OpenAI Responses, streamed and whole, without a store of its own: the input is the history.

In: a request body. Out: a `Request`, and the events or the body of the reply. Item ids and
`encrypted_content` are ids of ours, which say whose an item is when it comes back. Tools that are
no functions are left out. Refuses (BadRequest) previous_response_id, images and files.
"""

from typing import Any

from nanoswe_proxy import dialects, wire
from nanoswe_proxy.dialects import SHAPES, Request, chat
from nanoswe_proxy.errors import BadRequest, ProxyError
from nanoswe_proxy.render.types import Delta

RECORDED = ("temperature", "top_p", "max_tokens", "model", "tool_choice", "reasoning", "text")
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


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


class Stream(dialects.Stream):
    """See `dialects.Stream`."""

    kinds = {"content": "message", "reasoning": "reasoning", "call_name": "function_call",
             "call_args": "function_call"}  # fmt: skip

    def start(self) -> bytes:
        self.number = -1
        name, created = f"resp_{self.cap[:6]}{self.node.index}", self.node.created
        said = {"id": name, "created_at": created, "model": self.model}
        self.body = SHAPES["response"] | said
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(k, response=self.body) for k in kinds)

    def end(self) -> bytes:
        frames, prompt, sampled = self._close(), self.prompt_tokens, len(self.node.ids)
        cut = self.node.finish_reason == "length"
        self.body |= {"status": "incomplete" if cut else "completed", "output": self.blocks}
        self.body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self.body["usage"] = {
            "input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        return frames + self._event(f"response.{self.body['status']}", response=self.body)

    def whole(self) -> dict:
        return self.body

    def fail(self, error: ProxyError) -> bytes:
        self.body |= {"status": "failed", "error": {"code": error.code, "message": str(error)}}
        return self._event("response.failed", response=self.body)

    def _open(self, kind: str, delta: Delta) -> bytes:
        n = len(self.blocks)
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        item["id"] = self.ours(f"{kind[:2]}_{n}_")
        if kind == "function_call":
            call_id = self.ours("call", delta.index)
            item |= {"call_id": call_id, "name": delta.text, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": [], "encrypted_content": self.ours("enc")}
        else:
            item |= {"role": "assistant", "content": []}
        self.blocks.append(item)
        frames = self._event("response.output_item.added", output_index=n, item=item)
        if kind in PARTS:
            part: dict[str, Any] = {"type": PARTS[kind], "text": "", "annotations": []}
            item["content"] = [part]
            frames += self._part("response.content_part.added", content_index=0, part=part)
        return frames

    def _grow(self, block: dict[str, Any], text: str) -> bytes:
        if block["type"] == "function_call":
            block["arguments"] += text
            return self._part("response.function_call_arguments.delta", delta=text)
        block["content"][0]["text"] += text
        name = f"response.{PARTS[block['type']]}.delta"
        return self._part(name, content_index=0, delta=text, logprobs=[])

    def _close(self) -> bytes:
        if not self.blocks:
            return b""
        item, at = self.blocks[-1], len(self.blocks) - 1
        item["status"] = "completed"
        if item["type"] == "function_call":
            whole = {k: item[k] for k in ("arguments", "name")}
            frames = self._part("response.function_call_arguments.done", **whole)
        else:
            part, name = item["content"][0], f"response.{PARTS[item['type']]}.done"
            frames = self._part(name, content_index=0, text=part["text"], logprobs=[])
            frames += self._part("response.content_part.done", content_index=0, part=part)
        return frames + self._event("response.output_item.done", output_index=at, item=item)

    def _part(self, kind: str, **fields: Any) -> bytes:
        at = {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}
        return self._event(kind, **at, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return self.sse({"type": kind, "sequence_number": self.number, **fields}, kind)
