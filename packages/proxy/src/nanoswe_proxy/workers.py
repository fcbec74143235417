"""Several workers behind one port: each is a `serve` of its own, with its own port and logs.

In: the arguments of `serve`. Out: a front that opens sessions on each worker in turn, sends what is
asked about a session to the worker that its capability names, and what concerns all to all of them.
Agents ask their worker: here they are told where it is (421). A worker that dies is started again
on the same port, and takes up its sessions from its logs. Ends (ProxyError) where one cannot start.
"""

import asyncio
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import cycle

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from nanoswe_proxy.app import body_of, refused
from nanoswe_proxy.errors import ProxyError

NAMED = re.compile(r"w([0-9]+)-")
START = ("-c", "from nanoswe_proxy.cli import main; main()")
log = logging.getLogger(__name__)


class Front:
    """What the main port answers."""

    root_url, connected = "", None  # as `app.serve` wants of a proxy

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls, self._turn = urls, cycle(range(len(urls)))
        self.client = httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits())

    def app(self) -> Starlette:
        control = ("/sessions", "/sessions/{cap}", "/sessions/{cap}/{what}", "/s/{cap}/view")
        routes = [Route(path, self.pass_on, methods=["GET", "POST"]) for path in control]
        routes += [Route(p, self.to_all, methods=["POST"]) for p in ("/pause", "/resume")]
        agents = ("/s/{cap}/v1/{rest:path}", "/v1/{rest:path}")
        routes += [Route(path, self.elsewhere, methods=["GET", "POST"]) for path in agents]
        routes += [Route(path, self.health) for path in ("/health", "/healthz")]
        routes.append(Route("/metrics", self.metrics))
        return Starlette(routes=routes, exception_handlers={ProxyError: refused})

    def worker(self, cap: str) -> str:
        """The URL of the worker that a capability names."""
        named = NAMED.match(cap)
        if not named or int(named[1]) >= len(self.urls):
            raise ProxyError("no session has this capability", 404, "unknown_session")
        return self.urls[int(named[1])]

    async def pass_on(self, request: Request) -> Response:
        cap = request.path_params.get("cap")
        url = self.urls[next(self._turn)] if cap is None else self.worker(cap)
        return await self._ask(url, request, await body_of(request))

    async def to_all(self, request: Request) -> Response:
        """The first answer that is an error, else the first."""
        raw = await body_of(request)
        answers = await asyncio.gather(*(self._ask(url, request, raw) for url in self.urls))
        return max(answers, key=lambda answer: answer.status_code)

    async def elsewhere(self, request: Request) -> Response:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        keys = [request.headers.get(name, "") for name in ("x-nanoswe-session", "x-api-key")]
        named = [k for k in (request.path_params.get("cap"), *keys, bearer) if k and NAMED.match(k)]
        url = self.worker(named[0] if named else "")
        raise ProxyError(f"this session's worker is {url}: ask it there", 421, "wrong_worker")

    async def health(self, request: Request) -> Response:
        async def of(url: str) -> dict:
            with suppress(httpx.HTTPError):
                return dict((await self.client.get(f"{url}/healthz", timeout=2)).json())
            return {"status": "busy", "open_sessions": 0}

        known = await asyncio.gather(*map(of, self.urls))
        status = "ok" if all(k["status"] == "ok" for k in known) else "busy"
        count = sum(k["open_sessions"] for k in known)
        return JSONResponse({"status": status, "open_sessions": count, "workers": known})

    async def metrics(self, request: Request) -> Response:
        """Sums over the workers."""
        sums: Counter[str] = Counter()
        for answer in await asyncio.gather(*(self.client.get(f"{u}/metrics") for u in self.urls)):
            for name, _, value in (line.rpartition(" ") for line in answer.text.splitlines()):
                sums[name] += int(value)
        return PlainTextResponse("".join(f"{k} {v}\n" for k, v in sorted(sums.items())))

    async def _ask(self, url: str, request: Request, raw: bytes) -> Response:
        key = {"authorization": request.headers.get("authorization", "")}
        how, at = request.method, f"{url}{request.url.path}"
        try:
            answer = await self.client.request(how, at, content=raw, headers=key)
        except httpx.HTTPError as error:  # it died on the way
            text = f"worker {url}: {type(error).__name__}: ask again"
            raise ProxyError(text, 503, "worker_lost") from error
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)


@asynccontextmanager
async def running(count: int, host: str, port: int) -> AsyncIterator[tuple[Front, asyncio.Task]]:
    """`count` workers on the ports after `port`, each started again when it dies; and what watches
    them, which ends with an error where one cannot start.
    """
    ports = [port + 1 + n if port else 0 for n in range(count)]
    listeners = [socket.create_server((host, at), backlog=2048) for at in ports]
    front = Front([f"http://{host}:{listener.getsockname()[1]}" for listener in listeners])
    started = [asyncio.Event() for _ in range(count)]

    async def keep_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for n in range(count):
                    group.create_task(_keep(front, n, listeners[n].fileno(), started))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    watching: asyncio.Task = asyncio.create_task(keep_all())
    ready: asyncio.Future = asyncio.gather(*(event.wait() for event in started))
    try:
        await asyncio.wait([watching, ready], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        yield front, watching
    finally:
        watching.cancel()
        ready.cancel()
        await asyncio.gather(watching, ready, return_exceptions=True)
        await front.client.aclose()
        for listener in listeners:
            listener.close()


async def _keep(front: Front, n: int, fd: int, started: Sequence[asyncio.Event]) -> None:
    """Worker `n`, and the next one where it dies."""
    if n:  # what is wrong is said once
        await started[0].wait()
    while True:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *START, *sys.argv[1:], "--worker", f"{n}:{fd}",
            stdin=asyncio.subprocess.PIPE, pass_fds=[fd],
        )  # fmt: skip
        try:
            ended = asyncio.ensure_future(process.wait())
            up = asyncio.ensure_future(_answers(front, n))
            await asyncio.wait([ended, up], return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                up.cancel()
                raise ProxyError(f"worker {n} ended with code {ended.result()} as it started")
            started[n].set()
            log.warning("worker %d ended with code %d, and starts again", n, await ended)
        finally:
            if process.returncode is None:  # its input ends: so does it, in good order
                assert process.stdin
                process.stdin.close()
                await process.wait()


async def _answers(front: Front, n: int) -> None:
    while True:
        with suppress(httpx.HTTPError):
            await front.client.get(f"{front.urls[n]}/healthz")
            return
        await asyncio.sleep(0.1)
