"""OpenAI's legacy Completions, streamed and whole: prompts as text or ids, replies as text.

In: a request body. Out: a `Request` of prompts, each with `n` replies, and the frames or the body
of those. What the tokenizer calls structure is structure here: such a prompt is the client's own.
Refuses (BadRequest) what cannot be exact: logprobs of tokens that were not sampled (`logprobs` over
0, or with `echo`), `best_of` and `suffix`.
"""

import codecs
from typing import Any

from nanoswe_proxy import wire
from nanoswe_proxy.dialects import Request, chat
from nanoswe_proxy.errors import BadRequest
from nanoswe_proxy.render.types import Delta

RECORDED = ("temperature", "top_p", "max_tokens", "seed", "model", "n", "stop", "echo", "logprobs")


def parse(raw: bytes) -> Request:
    """The request in `raw`."""
    body = wire.loads(raw)
    asked = chat.asked_of({"max_tokens": 16} | body, RECORDED)  # the protocol's own
    n, how, prompts = asked["n"], asked["requested"], body.get("prompt")
    if not isinstance(prompts, list) or _ids(prompts):
        prompts = [prompts]
    if not prompts or not all(isinstance(p, str) or _ids(p) for p in prompts):
        raise BadRequest("prompt must be text, a list of token ids, or a list of such")
    if n * len(prompts) > chat.MAX_CHOICES:
        raise BadRequest(f"prompts times n must be at most {chat.MAX_CHOICES}")
    if body.get("suffix") or body.get("best_of") not in (None, n):
        raise BadRequest("suffix and best_of are not supported")
    logged = how.get("logprobs", 0)
    if type(logged) is not int or logged or ("logprobs" in how and how.get("echo")):
        raise BadRequest("logprobs must be 0 and without echo: only sampled tokens have any")
    return Request([], None, prompts=prompts, **asked)


def _ids(prompt: Any) -> bool:
    fits = isinstance(prompt, list) and prompt
    return bool(fits) and all(type(i) is int and 0 <= i < 1 << 31 for i in prompt)


class Stream(chat.Stream):
    """See `dialects.Stream`."""

    name, kind, chunk = "cmpl", "text_completion", "text_completion"

    def start(self) -> bytes:
        self.messages = [{"content": ""} for _ in self.calls]
        self.size = [0] * len(self.calls)  # characters whose logprobs are told
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self.calls]
        if not self.request.requested.get("echo"):
            return b""
        return b"".join(self.delta(self._prompt(i), i) for i in range(len(self.calls)))

    def _prompt(self, choice: int) -> Delta:
        prompt, codec = self.request.prompts[choice // self.request.n], self.calls[0].reader.codec
        return Delta("content", 0, prompt if isinstance(prompt, str) else codec.decode(prompt))

    def _choice(self, choice: int, said: dict, finish: str | None) -> dict:
        logged = self._logprobs(choice) if "logprobs" in self.request.requested else None
        text = next(iter(said.values())).get("content", "")
        return {"text": text, "index": choice, "logprobs": logged, "finish_reason": finish}

    def _logprobs(self, choice: int) -> dict:
        told, offsets = self._fresh(choice), []
        for token in told:
            offsets.append(self.size[choice])
            self.size[choice] += len(self.decoders[choice].decode(bytes(token["bytes"])))
        names, logprobs = ([t[key] for t in told] for key in ("token", "logprob"))
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": None,
                "text_offset": offsets}  # fmt: skip
