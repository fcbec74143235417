"""Inference servers over HTTP: token ids in, ids and logprobs out, token by token.

In: a server's URL. vLLM: `/inference/v1/generate` where it is on (`--enable-scale-out`), else
`/v1/completions`; SGLang: `/generate`. The KV cache is salted by session and weight version, a
prompt's shared prefix is serialised once, a client that goes away aborts the request. Out: an
Engine with `pause` (what is in flight is cut off) and `resume` (with the next version, from the
tokens it has). Refuses (EngineError) what is no such server, and a token without its logprob.
"""

import asyncio
import hashlib
import json
import os
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.engine.upstream import Upstream
from nanoswe_proxy.errors import EngineError

KEY, TOKENS_PATH = "NANOSWE_ENGINE_KEY", "/inference/v1/generate"
STRETCH = 8192  # ids written at once
MAX_TEXT_BYTES = 64 << 20  # of prompts' text kept; the sessions that spoke last have theirs
GRACE_SEC = 1.0
UNLOGGED = -9999.0  # what servers write for a logprob that is -inf or NaN
PLAIN = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
Read = tuple[list[tuple[int, float | None]], str]  # tokens, logprobs; why it ended if it did


class RemoteEngine:
    """vLLM. To pause it, start it with VLLM_SERVER_DEV_MODE=1; to sample at a temperature other
    than 1, with `--logprobs-mode processed_logprobs`.
    """

    path, pause_path, resume_path = "/v1/completions", "/pause", "/resume"

    def __init__(self, url: str, key: str, model: str, max_context: int) -> None:
        self.upstream, self.headers = Upstream(url, key), {"Authorization": f"Bearer {key}"}
        self.model, self.max_context, self.version = model, max_context, 0
        self._running = asyncio.Event()
        self._running.set()
        self._texts: OrderedDict[str, tuple[int, bytes, bytes]] = OrderedDict()

    @staticmethod
    def from_spec(argument: str, model: Path) -> "RemoteEngine":
        """`argument`: the server's URL. Its key, if it wants one, is in NANOSWE_ENGINE_KEY."""
        url, key = argument.rstrip("/").removesuffix("/v1"), os.environ.get(KEY) or "none"
        with httpx.Client(base_url=url, timeout=30) as client:
            client.headers["Authorization"] = f"Bearer {key}"
            try:
                card = client.get("/v1/models").raise_for_status().json()["data"][0]
                kind = SglangEngine if card.get("owned_by") == "sglang" else RemoteEngine
                engine = kind(url, key, card["id"], int(card["max_model_len"]))
                # 403 or 404 where token generation is off, 400 or 422 for a body without ids
                if client.post(TOKENS_PATH, json={}).status_code in (400, 422):
                    engine.path = TOKENS_PATH
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                raise EngineError(f"{url} is no vLLM or SGLang server: {error!r}") from error
        return engine

    async def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]:
        got, finish = array("I"), "abort"
        stops = {"temperature": sampling.temperature, "stop_token_ids": list(sampling.stop_ids)}
        while finish == "abort":
            await self._running.wait()
            version, before = self.version, len(got)
            seed = int(_digest(f"{sampling.seed_key}/{before}")[:7], 16)
            left, salt = sampling.max_tokens - before, f"{_digest(session)}.{version}"
            head, tail = json.dumps(self._request(PLAIN | stops, left, seed, salt)).split('"IDS"')
            text = await self._text(session, array("I", ids) + got)
            stream = self.upstream.events(self.path, head.encode(), text, tail.encode())
            async with aclosing(stream) as events:
                async for event in events:
                    if event == b"[DONE]":
                        continue
                    try:
                        pairs, finish = self._read(from_json(event), len(got) - before)
                    except (LookupError, TypeError, ValueError) as error:
                        raise EngineError(f"the server says {event.decode()[:300]}") from error
                    for token, logprob in pairs:
                        if logprob is None or not logprob > UNLOGGED:
                            raise EngineError(f"no logprob for sampled token {token}")
                        got.append(token)
                        yield Sampled(token, logprob, version)
            if finish == "abort" and self._running.is_set():
                await asyncio.sleep(GRACE_SEC)  # another worker's pause may come before ours
                if self._running.is_set():
                    raise EngineError("the server aborted the request")

    async def release(self, session: str) -> None:
        self._texts.pop(session, None)

    async def pause(self) -> None:
        """New calls wait. Those in flight are cut off, and go on after `resume`."""
        self._running.clear()
        try:
            await self._command(self.pause_path, {"mode": "abort"})
        except BaseException:
            self._running.set()
            raise

    async def resume(self, version: int) -> None:
        """From here on the weights are those of `version`."""
        await self._command(self.resume_path, {})
        self.version = version
        self._running.set()

    async def _command(self, path: str, body: dict[str, str]) -> None:
        async with httpx.AsyncClient(headers=self.headers, timeout=600) as client:
            try:
                answer = await client.post(self.upstream.url + path, params=body, json=body)
            except httpx.HTTPError as error:
                raise EngineError(f"{self.upstream.url}{path}: {error!r}") from error
        if answer.is_error:
            raise EngineError(f"{path} answered {answer.status_code}: is VLLM_SERVER_DEV_MODE=1?")

    async def _text(self, session: str, ids: "array[int]") -> bytes:
        """`ids` as JSON numbers; what goes on from the session's last prompt is written alone, in
        stretches, between which others have their turn.
        """
        held, digest, text = self._texts.pop(session, (0, b"", b""))
        seen = hashlib.sha1(memoryview(ids)[:held], usedforsecurity=False)
        if seen.digest() != digest:
            held, text, seen = 0, b"", hashlib.sha1(usedforsecurity=False)
        seen.update(memoryview(ids)[held:])
        parts = [text] if text else []
        for at in range(held, len(ids), STRETCH):
            if at > held:
                await asyncio.sleep(0)
            parts.append(to_json(ids[at : at + STRETCH].tolist())[1:-1])
        text = b",".join(parts)
        self._texts[session] = (len(ids), seen.digest(), text)
        while sum(len(t) for *_, t in self._texts.values()) > MAX_TEXT_BYTES:
            self._texts.popitem(last=False)
        return text

    def _request(self, how: dict, left: int, seed: int, salt: str) -> dict[str, Any]:
        how |= {"max_tokens": left, "seed": seed, "top_k": 0, "logprobs": 0}
        common = {"model": self.model, "stream": True, "cache_salt": salt}
        if self.path == TOKENS_PATH:
            return {**common, "token_ids": ["IDS"], "sampling_params": {**how, "detokenize": False}}
        return {**common, **how, "prompt": ["IDS"], "return_tokens_as_token_ids": True}

    def _read(self, event: dict[str, Any], seen: int) -> Read:
        choice = event["choices"][0]
        logged = choice.get("logprobs") or {"content": []}
        if "content" in logged:
            pairs = [(c["token_id"], c["logprob"]) for c in logged["content"]]
        else:
            ids = (int(t.removeprefix("token_id:")) for t in logged["tokens"])
            pairs = list(zip(ids, logged["token_logprobs"], strict=True))
        return pairs, choice.get("finish_reason") or ""


class SglangEngine(RemoteEngine):
    """SGLang. Its logprobs are those of the sampling distribution by default."""

    path, pause_path, resume_path = "/generate", "/pause_generation", "/continue_generation"

    def _request(self, how: dict, left: int, seed: int, salt: str) -> dict[str, Any]:
        how |= {"max_new_tokens": left, "sampling_seed": seed, "top_k": -1, "no_stop_trim": True}
        common = {"stream": True, "return_logprob": True, "extra_key": salt}
        return {**common, "input_ids": ["IDS"], "sampling_params": how}

    def _read(self, event: dict[str, Any], seen: int) -> Read:
        meta = event["meta_info"]
        logged = meta.get("output_token_logprobs") or []
        # A chunk has all tokens so far, or the new ones: `completion_tokens` tells which.
        fresh = logged[max(0, seen - meta["completion_tokens"] + len(logged)) :]
        finish = (meta.get("finish_reason") or {}).get("type", "")
        return [(int(token), logprob) for logprob, token, *_ in fresh], finish


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()
