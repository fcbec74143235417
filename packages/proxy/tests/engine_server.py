"""A ScriptedEngine behind the HTTP of vLLM and SGLang, as their sources define it.

In: the requests that this package and its peers send: `/v1/completions`, `/inference/v1/generate`
and `/v1/chat/completions` with `return_token_ids` (vLLM), `/generate` with `input_ids` (SGLang),
each streamed or not, and pause and resume. Out: answers in those servers' shapes; the engine's own
log of every prompt stays the ground truth. A chat request is rendered as those servers do it: the
Jinja template to text, the text to ids, all of it again at every turn.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanoswe_proxy.engine.base import Sampling
from nanoswe_proxy.engine.scripted import ScriptedEngine


class Server:
    """The handlers. `tokens_only` turns `/inference/v1/generate` on; `fault` is an answer."""

    def __init__(self, engine: ScriptedEngine, stop_ids: tuple[int, ...], kind: str = "vllm",
                 tokens_path: bool = False, render=None, parse=None) -> None:  # fmt: skip
        self.engine, self.stop_ids, self.kind = engine, stop_ids, kind
        self.tokens_path, self.render, self.parse = tokens_path, render, parse
        self.bodies: list[dict] = []
        self.fault: tuple[int, str] | None = None
        self.hung_up = 0
        self.paused = asyncio.Event()
        self.running = asyncio.Event()
        self.running.set()

    def app(self) -> Starlette:
        post = {
            "/v1/completions": self.completions,
            "/inference/v1/generate": self.tokens,
            "/v1/chat/completions": self.chat,
            "/generate": self.sglang,
            "/pause": self.pause,
            "/pause_generation": self.pause,
            "/resume": self.resume,
            "/continue_generation": self.resume,
        }
        routes = [Route(path, to, methods=["POST"]) for path, to in post.items()]
        return Starlette(routes=[*routes, Route("/v1/models", self.models)])

    async def models(self, request: Request) -> Response:
        card = {"id": "tiny", "owned_by": self.kind, "max_model_len": self.engine.max_context}
        return JSONResponse({"object": "list", "data": [card]})

    async def pause(self, request: Request) -> Response:
        self.running.clear()
        self.paused.set()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.paused.clear()
        self.running.set()
        return JSONResponse({"status": "resumed"})

    async def _sample(self, body: dict, ids: list[int], how: dict, most: str) -> AsyncIterator:
        """Tokens as they come, and the cause of the end with the last one, or after it."""
        await self.running.wait()
        stops = tuple(how.get("stop_token_ids") or ()) or self.stop_ids
        wanted = how.get(most) or how.get("max_completion_tokens") or self.engine.max_context
        room = self.engine.max_context - len(ids)
        sampling = Sampling(
            how.get("temperature") or 0.0,
            min(wanted, room),
            stops,
            str(how.get("seed", how.get("sampling_seed"))),
        )
        session = str(body.get("cache_salt") or body.get("extra_key") or "direct")
        done, left = None, sampling.max_tokens
        stream = self.engine.generate(session.split(".")[0], ids, sampling)
        sampled = await anext(stream, None)
        while sampled:
            if self.paused.is_set():
                self.engine.log[-1].sampled.pop()  # it was never sent
                yield None, "abort"
                return
            left -= 1
            ending = sampled.token in stops or not left
            after = await anext(stream, None) if ending else None
            done = (
                ("stop" if sampled.token in stops else "length") if ending and not after else None
            )
            yield sampled, done
            sampled = after or (None if ending else await anext(stream, None))
        if not done:
            yield None, "length"

    async def _body(self, request: Request) -> dict:
        body = json.loads(await request.body())
        self.bodies.append(body)
        return body

    def _stream(self, events: AsyncIterator[dict]) -> Response:
        async def lines() -> AsyncIterator[str]:
            try:
                async for event in events:
                    yield f"data: {json.dumps(event)}\n\n"
                yield "data: [DONE]\n\n"
            except asyncio.CancelledError:
                self.hung_up += 1
                raise

        return StreamingResponse(lines(), media_type="text/event-stream")

    def _refused(self) -> Response | None:
        if self.fault:
            return JSONResponse({"error": {"message": self.fault[1]}}, self.fault[0])
        return None

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        if refused := self._refused():
            return refused

        async def events() -> AsyncIterator[dict]:
            async for item, ended in self._sample(body, body["prompt"], body, "max_tokens"):
                logged: dict = {"tokens": [], "token_logprobs": []}
                choice = {"index": 0, "text": "", "logprobs": logged, "finish_reason": ended}
                if item:
                    logged["tokens"].append(f"token_id:{item.token}")
                    logged["token_logprobs"].append(item.logprob)
                    if body.get("return_token_ids"):
                        choice |= {"token_ids": [item.token], "prompt_token_ids": body["prompt"]}
                yield {"object": "text_completion", "choices": [choice]}

        if body.get("stream"):
            return self._stream(events())
        items = [i async for i in self._sample(body, body["prompt"], body, "max_tokens")]
        tokens = [t for t, _ in items if t]
        text = self.engine.tokenizer.decode([t.token for t in tokens], skip_special_tokens=True)
        logged = {"tokens": [f"token_id:{t.token}" for t in tokens],
                  "token_logprobs": [t.logprob for t in tokens]}  # fmt: skip
        choice = {"index": 0, "text": text, "logprobs": logged, "finish_reason": items[-1][1],
                  "stop_reason": None, "prompt_token_ids": body["prompt"],
                  "token_ids": [t.token for t in tokens]}  # fmt: skip
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "created": 0,
                             "model": "tiny", "choices": [choice],
                             "usage": _usage(len(body["prompt"]), len(tokens))})  # fmt: skip

    async def tokens(self, request: Request) -> Response:
        if not self.tokens_path:
            return JSONResponse({"error": "start with --enable-scale-out"}, 403)
        if await request.body() == b"{}":
            return JSONResponse({"error": {"message": "token_ids: Field required"}}, 400)
        body = await self._body(request)
        if refused := self._refused():
            return refused

        async def events() -> AsyncIterator[dict]:
            how = body["sampling_params"]
            async for item, ended in self._sample(body, body["token_ids"], how, "max_tokens"):
                choice: dict = {"index": 0, "token_ids": [], "logprobs": None}
                choice["finish_reason"] = ended
                if item:
                    one = {"token": f"token_id:{item.token}", "token_id": item.token, "rank": 1}
                    content = [one | {"logprob": item.logprob}]
                    choice |= {"token_ids": [item.token], "logprobs": {"content": content}}
                yield {"request_id": "r", "output_mode": "tokens", "choices": [choice]}

        if body.get("stream"):
            return self._stream(events())
        choices = [event["choices"][0] async for event in events()]
        whole = choices[-1] | {"token_ids": [t for c in choices for t in c["token_ids"]]}
        logged = [c["logprobs"]["content"][0] for c in choices if c["logprobs"]]
        answer = {"request_id": "r", "choices": [whole | {"logprobs": {"content": logged}}]}
        return JSONResponse(answer)

    async def sglang(self, request: Request) -> Response:
        body = await self._body(request)
        if refused := self._refused():
            return refused

        async def events() -> AsyncIterator[dict]:
            logged: list = []
            how = body["sampling_params"]
            async for item, cause in self._sample(body, body["input_ids"], how, "max_new_tokens"):
                ended = {"type": cause} if cause else None
                if item:
                    logged.append([item.logprob, item.token, None])
                # cumulative, as SGLang is unless started with --stream-output
                meta = {"id": "r", "finish_reason": ended, "completion_tokens": len(logged),
                        "output_token_logprobs": logged}  # fmt: skip
                yield {"text": "", "output_ids": [t for _, t, _ in logged], "meta_info": meta}

        return self._stream(events())

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        if refused := self._refused():
            return refused
        ids = self.render(body["messages"], body.get("tools"))
        if len(ids) >= self.engine.max_context:
            say = f"This model's maximum context length is {self.engine.max_context} tokens."
            error = {"message": say, "type": "BadRequestError", "code": 400, "param": None}
            return JSONResponse({"error": error}, 400)
        items = [i async for i in self._sample(body, ids, body, "max_tokens")]
        tokens, ended = [t for t, _ in items if t], items[-1][1]
        message = self.parse([t.token for t in tokens])
        logged = [
            {
                "token": f"token_id:{t.token}",
                "logprob": t.logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for t in tokens
        ]
        cause = "tool_calls" if message.get("tool_calls") and ended == "stop" else ended
        choice = {"index": 0, "message": message, "finish_reason": cause,
                  "logprobs": {"content": logged} if body.get("logprobs") else None,
                  "token_ids": [t.token for t in tokens]}  # fmt: skip
        if body.get("stream"):
            return self._stream(_in_pieces(message, choice, ids, tokens))
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "tiny",
                  "choices": [choice], "prompt_token_ids": ids,
                  "usage": _usage(len(ids), len(tokens))}  # fmt: skip
        return JSONResponse(answer)


async def _in_pieces(message: dict, choice: dict, ids: list[int], tokens: list) -> AsyncIterator:
    """A chat reply as chunks: the prompt ids in the first, all sampled ids in the last."""
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}
    text = message["content"] or ""
    deltas: list[dict] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text[i : i + 7]} for i in range(0, len(text), 7)]
    deltas += [
        {"tool_calls": [{"index": i, **call}]}
        for i, call in enumerate(message.get("tool_calls", ()))
    ]
    for n, delta in enumerate(deltas):
        part = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": []}
        yield {**chunk, "choices": [part]} | ({} if n else {"prompt_token_ids": ids})
    last = {k: choice[k] for k in ("index", "finish_reason", "token_ids", "logprobs")}
    yield {**chunk, "choices": [last | {"delta": {}}], "usage": _usage(len(ids), len(tokens))}


def _usage(prompt: int, completion: int) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": completion,
            "total_tokens": prompt + completion}  # fmt: skip


def folder_tokens(folder: Path, *names: str) -> tuple[int, ...]:
    """Ids of tokens by their spelling."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {t["content"]: t["id"] for t in added}
    return tuple(ids[n] for n in names)
