"""The HTTP shell: agents' routes under a capability, the trainer's routes, health and metrics.

In: HTTP. Out: answers and errors shaped as each dialect's clients read them. Whether a reply
reached its client is decided here, by the socket. Refuses bodies over the size limit (413) before
reading them whole. Control routes exist only with `control=True`.
"""

import asyncio
import inspect
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanoswe_proxy import export, view, wire
from nanoswe_proxy.dialects import Request, Stream, chat, completions, messages, responses
from nanoswe_proxy.engine.provider import Provider
from nanoswe_proxy.errors import BadRequest, ProxyError
from nanoswe_proxy.exchange import Exchange, follow
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.trajectory import Trajectory

MAX_BODY_BYTES = 32 * 1024 * 1024
DIALECTS = {"chat/completions": chat, "completions": completions, "messages": messages,
            "responses": responses}  # fmt: skip


class _Reply(Response):
    """A reply that watches its client, and knows whether the transport took the last byte."""

    def __init__(self, proxy: Proxy, dialect: Any, request: Request, cap: str, exchange: Exchange):
        self.peer = exchange.peer
        self.proxy, self.cap, self.exchange = proxy, cap, exchange
        self.stream: Stream = dialect.Stream(request, cap, exchange.calls)
        self.streamed, self.begun, self.over = request.stream, False, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        me, gone = asyncio.current_task(), asyncio.ensure_future(receive())  # only a disconnect
        gone.add_done_callback(lambda _: None if self.over or not me else me.cancel())
        try:
            async for frame in self._frames():
                if not self.begun:
                    await send(self._head(frame))
                self.begun = True
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            self.over = True
            if gone.done():
                raise asyncio.CancelledError
            await send({"type": "http.response.body", "body": b""})
            self.proxy.delivered(self.cap, self.exchange, self.peer)
        except BaseException:
            self.over = True
            self.proxy.undelivered(self.cap, self.exchange, self.begun, self.peer)
            if not gone.done():
                raise
        finally:
            gone.cancel()

    async def _frames(self) -> AsyncIterator[bytes]:
        """Nothing is said before the first deltas, so that a failure has its own status."""
        frame = self.stream.start()
        try:
            async for deltas in follow(self.exchange, self.streamed):
                frame += b"".join(self.stream.delta(*told) for told in deltas)
                if self.streamed:
                    yield frame or b": still here\n\n"
                    frame = b""
            end = self.stream.end()
            yield end if self.streamed else json.dumps(self.stream.whole()).encode()
        except ProxyError as error:
            if not self.begun:
                raise
            yield self.stream.fail(error)

    def _head(self, body: bytes) -> dict:
        kind = b"text/event-stream" if self.streamed else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        size = [] if self.streamed else [(b"content-length", str(len(body)).encode())]
        return {"type": "http.response.start", "status": 200, "headers": headers + size}


class _Routes:
    """The handlers of one proxy."""

    def __init__(self, proxy: Proxy, admin_key: str) -> None:
        self.proxy, self.admin_key = proxy, admin_key.encode()

    def control(self, act: Any, status: int = 200) -> Callable:
        """A route of the trainer's: only for whoever has the admin's key, if there is one."""

        async def handler(request: HttpRequest) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if self.admin_key and not secrets.compare_digest(given, self.admin_key):
                raise ProxyError("the admin's key is wanted as the bearer", 401, "admin_key_needed")
            self.proxy.root_url = self.proxy.root_url or str(request.base_url).rstrip("/")
            raw = await body_of(request)
            done = act(request.path_params.get("cap", ""), wire.loads(raw) if raw else {})
            done = await done if inspect.isawaitable(done) else done
            if isinstance(done, Trajectory):
                return Response(done.to_json(), media_type="application/json")
            return HTMLResponse(done) if isinstance(done, str) else JSONResponse(done, status)

        return handler

    def speak(self, dialect: Any, count: bool = False) -> Callable:
        """The handler of a dialect's calls; with `count`, of its question how long a prompt is."""

        async def handler(request: HttpRequest) -> Response:
            request.state.dialect = dialect
            if cap := request.path_params.get("cap", ""):
                self.proxy.live(cap)  # unknown ones are refused before the body is read
            raw = await body_of(request)
            cap = cap or self._named(request, str(wire.loads(raw).get("nanoswe_session") or ""))
            self.proxy.live(cap)
            if isinstance(self.proxy.engine, Provider):
                path = request.url.path.partition("/v1/")[2]
                return await self.proxy.engine.ask(self.proxy.live(cap).session, path, raw)
            wanted = dialect.parse(raw)
            if count:
                return JSONResponse({"input_tokens": await self.proxy.count(cap, wanted)})
            retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            key = request.headers.get("idempotency-key", "")
            how: dict = {"retry": retry, "key": key, "peer": request.client}
            exchange = await self.proxy.call(cap, raw, wanted, **how)
            return _Reply(self.proxy, dialect, wanted, cap, exchange)

        return handler

    def _named(self, request: HttpRequest, in_body: str = "") -> str:
        """The capability, where the URL has none; many clients send a key that is none."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        ours, key = (request.headers.get(h, "") for h in ("x-nanoswe-session", "x-api-key"))
        return min(filter(None, (ours, in_body, key, bearer)), key=self.proxy.rank, default="")

    async def models(self, request: HttpRequest) -> Response:
        self.proxy.live(request.path_params.get("cap") or self._named(request))
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "nanoswe"}
        return JSONResponse({"object": "list", "data": [model]})

    def open(self, _: str, wanted: dict) -> dict:
        sampling = wanted.pop("sampling", None) or {}
        if "trial_id" not in wanted or not isinstance(sampling, dict):
            raise BadRequest("trial_id is missing, or sampling is no object")
        facts = {"try_": wanted.pop("try", 0)} | wanted | sampling
        cap = self.proxy.open(facts.pop("trial_id"), **facts)
        return {"cap": cap, "base_url": self.proxy.base_url(cap)}

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse(self.proxy.health())

    async def metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(self.proxy.metrics())

    async def error(self, request: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # no such route
            what = f"{request.method} {request.url.path}: {error.detail}"
            error = BadRequest(what, error.status_code)
        assert isinstance(error, ProxyError)
        self.proxy.counts[f'errors{{status="{error.status}"}}'] += 1
        return await refused(request, error)


async def refused(request: HttpRequest, error: Any) -> Response:
    """An error as its dialect's clients read it."""
    shape = getattr(getattr(request.state, "dialect", chat), "error", ProxyError.body)
    return JSONResponse(shape(error), error.status)


def create_app(proxy: Proxy, *, control: bool = True, admin_key: str = "") -> Starlette:
    """The ASGI application. `control` adds the routes that open, show and seal sessions; keep
    agents away from them, or give them a key.
    """
    to = _Routes(proxy, admin_key)
    routes = [Route("/healthz", to.health), Route("/metrics", to.metrics)]
    for at in ("/s/{cap}/v1", "/v1"):
        count = to.speak(messages, count=True)
        routes += [Route(f"{at}/models", to.models)]
        routes += [Route(f"{at}/messages/count_tokens", count, methods=["POST"])]
        routes += [Route(f"{at}/{p}", to.speak(d), methods=["POST"]) for p, d in DIALECTS.items()]
    if control:
        routes.append(Route("/sessions", to.control(to.open, 201), methods=["POST"]))
        posted: dict[str, Callable] = {
            "/sessions/{cap}/annotate": lambda cap, notes: proxy.live(cap).session.annotate(notes),
            "/sessions/{cap}/seal": lambda cap, _: proxy.seal(cap),
            "/pause": lambda *_: proxy.pause(),
            "/resume": lambda _, wanted: proxy.resume(wanted.get("version")),
        }
        routes += [Route(p, to.control(act), methods=["POST"]) for p, act in posted.items()]
        shown = {"/sessions/{cap}": lambda cap, _: export.trajectory(proxy.live(cap).session),
                 "/s/{cap}/view": lambda cap, _: view.page(proxy.live(cap).session)}  # fmt: skip
        routes += [Route(p, to.control(act)) for p, act in shown.items()]
    handlers = dict.fromkeys((ProxyError, HTTPException), to.error)
    return Starlette(routes=routes, exception_handlers=handlers)


@asynccontextmanager
async def serve(
    proxy: Any, host: str = "127.0.0.1", port: int = 0, *, app: Starlette | None = None,
    fd: int = -1,
) -> AsyncIterator[str]:  # fmt: skip
    """Run uvicorn on this loop; yields the root URL. Agents' routes only, unless `app` has more.
    `fd` is a socket that listens already, instead of host and port; a `proxy` learns its URL.
    """
    # Clients end idle connections first (httpx: after 5 s): else a request meets the closing.
    server = uvicorn.Server(uvicorn.Config(
        app or create_app(proxy, control=False), log_config=None, log_level="warning",
        access_log=False, lifespan="off", ws="none", timeout_keep_alive=75,
        timeout_graceful_shutdown=2, proxy_headers=False, server_header=False,
    ))  # fmt: skip
    # Signals are for whoever owns the loop.
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    opened = server.server_state.connections
    proxy.connected = lambda peer: any(getattr(c, "client", None) == peer for c in opened)
    bound = (
        socket.socket(fileno=fd) if fd >= 0 else socket.create_server((host, port), backlog=2048)
    )
    with bound as listener:
        # asyncio does this for sockets that it makes itself; without it a reply waits 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        proxy.root_url = f"http://{host}:{listener.getsockname()[1]}"
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0.005)
            yield proxy.root_url
        finally:
            server.should_exit = True
            await running


def watch(proxy: Proxy, host: str, port: int) -> str:
    """Health and metrics from a thread of their own, which answers while the loop is busy; its URL.
    `late_sec` is how long the loop took to turn.
    """
    loop = asyncio.get_running_loop()

    async def health(request: HttpRequest) -> Response:
        began, turn = time.monotonic(), asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        await asyncio.wait({asyncio.wrap_future(turn)}, timeout=1.0)
        late = {"late_sec": round(time.monotonic() - began, 3)}
        return JSONResponse(proxy.health() | late | ({} if turn.done() else {"status": "busy"}))

    routes = [Route("/health", health), Route("/metrics", _Routes(proxy, "").metrics)]
    config = uvicorn.Config(Starlette(routes=routes), log_config=None, lifespan="off", ws="none")
    listener, run = socket.create_server((host, port)), uvicorn.Server(config).run
    threading.Thread(target=run, kwargs={"sockets": [listener]}, daemon=True).start()
    return f"http://{host}:{listener.getsockname()[1]}"


async def body_of(request: HttpRequest) -> bytes:
    """Refuses what is over the limit before it is read whole."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ProxyError(f"the body is over {MAX_BODY_BYTES} bytes", 413, "body_too_large")
    except ClientDisconnect as error:
        raise BadRequest("the client went away before its request was complete") from error
    return bytes(body)
