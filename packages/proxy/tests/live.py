"""A proxy on a thread for clients that block, and what is to be known of each client afterwards.

In: a model folder and scripts. Out: `Live` with a base URL per session, and after `facts()`: how
many of the ids that the proxy minted came back, the forks with their reasons, rows, and whether
every row is what the engine logged. The engine's own log is the truth.
"""

import asyncio
import re
import threading
from collections import Counter
from contextlib import contextmanager

from nanoswe_proxy.app import create_app, serve
from nanoswe_proxy.engine.scripted import ScriptedEngine
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer

MINTED = re.compile(rb'"([a-z_0-9]+x[0-9]+x[0-9a-f]{10})"')  # of a call, an item, a thought


def call(command: str, name: str = "bash", key: str = "command") -> str:
    """A reply that uses a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "{command}"}}}}\n</tool_call>'


class Live:
    def __init__(self, folder, scripts, max_context: int = 60_000) -> None:
        self.folder, self.scripts, self.max_context = folder, scripts, max_context
        self.requests: list[bytes] = []
        self.replies: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])

    def __enter__(self) -> "Live":
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    async def _run(self) -> None:
        self.engine = ScriptedEngine(self.folder, self.scripts, max_context=self.max_context)
        renderer = Renderer(self.folder)
        self.proxy = Proxy(self.engine, renderer, max_tokens=4000)
        async with serve(self.proxy, app=_recorded(create_app(self.proxy), self)):
            self._ready.set()
            await self._stop.wait()

    def open(self, name: str) -> str:
        """A session; its capability. Its base URL is `self.proxy.base_url(cap)`."""
        return self.call(self._open(name))

    async def _open(self, name: str) -> str:
        return self.proxy.open(name)

    def facts(self, cap: str) -> dict:
        """Seal and compare with the engine's log."""
        trajectory = self.call(self.proxy.seal(cap))
        exact = 0
        entries = [e for e in self.engine.log if e.session == cap]
        for entry in entries:
            whole = entry.prompt + tuple(s.token for s in entry.sampled)
            n = len(entry.prompt)
            exact += any(
                r.tokens[: len(whole)] == whole
                and all(r.mask[n : len(whole)])
                and r.logprobs[n : len(whole)] == tuple(s.logprob for s in entry.sampled)
                for r in trajectory.samples
            )
        minted = set(MINTED.findall(b"".join(self.replies)))
        later = b"".join(self.requests)
        survived = sum(m in later for m in minted)
        forks = Counter(t.fork for t in trajectory.turns if t.fork)
        return {
            "calls": len(entries),
            "ids": f"{survived}/{len(minted)}",
            "forks": ", ".join(f"{k} {v}" for k, v in forks.items()) or "none",
            "rows": len(trajectory.samples),
            "exact": f"{exact}/{len(entries)}",
            "masked": dict(trajectory.conservation.masked),
        }

    def requests_text(self) -> list[str]:
        """Bodies of requests so far."""
        return [r.decode() for r in self.requests]

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


def _recorded(app, live: Live):
    """The ASGI app, with bodies kept both ways."""

    async def recording(scope, receive, send):
        if scope["type"] != "http":
            return await app(scope, receive, send)
        body = bytearray()

        async def receive_too():
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and body and not message.get("more_body"):
                live.requests.append(bytes(body))
            return message

        async def send_too(message):
            live.replies.append(message.get("body", b""))
            await send(message)

        return await app(scope, receive_too, send_too)

    return recording


@contextmanager
def session(folder, scripts, name: str):
    """(live, capability, base URL)."""
    with Live(folder, scripts) as live:
        cap = live.open(name)
        yield live, cap, live.proxy.base_url(cap)
