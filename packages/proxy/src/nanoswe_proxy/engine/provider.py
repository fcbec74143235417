"""A provider that speaks OpenAI's protocol answers in place of an engine: for evaluation alone.

In: a session's request. Out: the answer as it is, streamed or whole; of each call messages, reply,
usage, logprobs and time are noted, but no tokens, so none trains. The provider's key is in
NANOSWE_PROVIDER_KEY; of a client nothing goes on but the body. Refuses (EngineError) a provider
that cannot be reached.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from email.utils import mktime_tz, parsedate_tz
from itertools import takewhile
from typing import Any

import httpx
from starlette.responses import Response, StreamingResponse

from nanoswe_proxy import wire
from nanoswe_proxy.dialects import sse
from nanoswe_proxy.errors import EngineError
from nanoswe_proxy.session import Session

KEY, BUSY, PATIENCE_SEC = "NANOSWE_PROVIDER_KEY", (429, 503, 529), 60.0
PASSED = ("content-type", "retry-after", "x-request-id")  # of the answer's headers
PROMPT = ("tools", "system", "instructions", "messages", "input", "prompt")
GROWING = ("content", "reasoning_content", "reasoning", "text", "refusal", "tool_calls")
COUNTS = (("prompt_tokens", "prompt_tokens", "input_tokens"),
          ("sampled_tokens", "completion_tokens", "output_tokens"))  # fmt: skip


class Provider:
    """In place of an Engine: `app` asks it for answers. `url` is the base URL that clients take."""

    version, max_context = 0, 1

    def __init__(self, url: str) -> None:
        at = httpx.URL(url)
        if at.scheme not in ("http", "https") or not at.host or at.userinfo or at.query:
            raise EngineError(f"a provider is https://HOST/v1, and its key is in {KEY}")
        self.url, self._key = url.rstrip("/"), os.environ.get(KEY) or "none"
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(900, connect=10, pool=None), limits=httpx.Limits(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )  # fmt: skip
        self._told: dict[str, list] = {}  # the last prompt of each session

    async def release(self, session: str) -> None:
        self._told.pop(session, None)

    async def ask(self, session: Session, path: str, raw: bytes) -> Response:
        """The answer to a request, whose body goes on as it is."""
        body, began = wire.loads(raw), time.monotonic()
        if body.pop("nanoswe_session", None):
            raw = json.dumps(body).encode()  # but for the capability
        parts = [(k, body.pop(k)) for k in PROMPT if k in body]
        told = [{k: p} for k, v in parts for p in (v if isinstance(v, list) else [v])]
        pairs = zip(self._told.get(session.cap, ()), told, strict=False)
        kept = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])  # of the prompt before
        self._told[session.cap] = told
        number, about = len(session.calls), {"requested": body, "kept": kept, "said": told[kept:]}
        session.foreign(number, path=path, delivery="", finish="", **about)
        answer, reply = await self._send(path, raw), bytearray()

        async def pieces() -> AsyncIterator[bytes]:
            facts: dict[str, Any] = {"status": answer.status_code, "delivery": "aborted"}
            try:
                if answer.is_error:
                    await answer.aread()
                async for piece in answer.aiter_bytes():
                    if answer.is_error:  # it may quote the key
                        piece = piece.replace(self._key.encode(), b"***")
                    reply.extend(piece)
                    yield piece
                facts["delivery"] = "delivered" if answer.is_success else "aborted"
            except httpx.HTTPError as error:
                yield sse(EngineError(f"the provider broke off: {error!r}").body())
            finally:
                await answer.aclose()
                facts["seconds"] = round(time.monotonic() - began, 3)
                if not session.sealed:
                    session.foreign(number, **facts, **noted(bytes(reply)))

        headers = {k: v for k, v in answer.headers.items() if k in PASSED}
        return StreamingResponse(pieces(), answer.status_code, headers)

    async def _send(self, path: str, raw: bytes) -> httpx.Response:
        """Twice again where the provider is busy, and says for how long."""
        wanted = self.client.build_request("POST", f"{self.url}/{path}", content=raw)
        for last in (False, False, True):
            try:
                answer = await self.client.send(wanted, stream=True)
            except httpx.HTTPError as error:
                text = f"the provider, {self.url}: {type(error).__name__}: {error}"
                raise EngineError(text) from error
            after = answer.headers.get("retry-after", "")[:40]  # seconds, or a date
            date = parsedate_tz(after)
            said = date[0] < 10_000 if date else after.isdecimal()
            if last or answer.status_code not in BUSY or not said:
                break
            await answer.aclose()
            wait = mktime_tz(date) - time.time() if date else int(after)
            await asyncio.sleep(max(0.0, min(wait, PATIENCE_SEC)))
        return answer


def noted(raw: bytes) -> dict[str, Any]:
    """What an answer says; of a stream what its choices add up to, or its events."""
    sent = [line[5:].strip() for line in raw.splitlines() if line.startswith(b"data:")]
    try:
        events = [json.loads(e) for e in sent if e != b"[DONE]"]
        told: dict[str, Any] = {k: v for e in events for k, v in e.items() if v}
        choices: dict[int, dict] = {}
        for choice in (c for e in events for c in e.get("choices") or ()):
            logged = {f"logprobs_{k}": v for k, v in (choice.get("logprobs") or {}).items()}
            joined = choices.setdefault(choice["index"], {})
            for key, more in {**choice, **choice.pop("delta", {}), **logged}.items():
                was, grows = joined.get(key), key in GROWING or key in logged
                joined[key] = was + more if grows and was and more else more or was
        told |= {"choices": [*choices.values()]} if choices else {"events": events}
        told = dict(told.get("response") or told) if events else dict(json.loads(raw))
        ended = (told.get("choices") or [{}])[0].get("finish_reason") or told.get("stop_reason")
        usage = told.get("usage") or {}
        count = {k: int(usage.get(a, usage.get(b, 0))) for k, a, b in COUNTS}
        return {"reply": told, "finish": str(ended or ""), **count}
    except (ValueError, TypeError, LookupError, AttributeError):
        return {"reply": {"text": raw.decode(errors="replace")}}
