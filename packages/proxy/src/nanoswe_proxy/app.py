"""The HTTP shell: agents' routes under a capability, the trainer's control routes, health and
metrics.

In: HTTP. Out: OpenAI-shaped answers and errors. Whether a reply reached its client is decided here,
by the socket. Refuses bodies over the size limit (413) before reading them whole. Control routes
exist only with `control=True`.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanoswe_proxy import wire
from nanoswe_proxy.errors import BadRequest, ProxyError, TooLarge
from nanoswe_proxy.proxy import Exchange, Proxy
from nanoswe_proxy.trajectory import Trajectory

MAX_BODY_BYTES = 32 * 1024 * 1024
CLIENT_GONE = 499
OPENING = {"trial_id": (str,), "try": (int,), "seed_key": (str,), "temperature": (int, float),
           "max_tokens": (int,)}  # fmt: skip
LEAST = {"try": 0, "temperature": 0, "max_tokens": 1}


class _Reply(Response):
    """A reply that knows whether the transport took it."""

    def __init__(self, content: bytes, proxy: Proxy, cap: str, exchange: Exchange) -> None:
        super().__init__(content, media_type="application/json")
        self.report = (proxy, cap, exchange)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        proxy, cap, exchange = self.report
        try:
            await super().__call__(scope, receive, send)
        except BaseException:
            proxy.undelivered(cap, exchange)
            raise
        proxy.delivered(cap, exchange)


class _Routes:
    """The handlers of one proxy."""

    def __init__(self, proxy: Proxy, on_seal: Callable[[Trajectory], None] | None) -> None:
        self.proxy, self.on_seal = proxy, on_seal

    async def chat(self, request: Request) -> Response:
        cap = request.path_params["cap"]
        self.proxy.live(cap)  # an unknown capability is refused before its body is read
        exchange = self.proxy.chat(cap, await _body(request))
        gone = asyncio.ensure_future(
            request.receive()
        )  # after the body, only a disconnect can come
        try:
            await asyncio.wait({exchange.task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.proxy.undelivered(cap, exchange)
                return Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:
            self.proxy.undelivered(cap, exchange)
            raise
        finally:
            gone.cancel()
        return _Reply(exchange.task.result(), self.proxy, cap, exchange)

    async def models(self, request: Request) -> Response:
        self.proxy.live(request.path_params["cap"])
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "nanoswe"}
        return JSONResponse({"object": "list", "data": [model]})

    async def open(self, request: Request) -> Response:
        wanted = wire.loads(await _body(request))
        facts = wanted | wanted.get("sampling", {})
        facts.pop("sampling", None)
        for key, value in facts.items():
            if type(value) not in OPENING.get(key, ()) or (key in LEAST and value < LEAST[key]):
                raise BadRequest(f"{key} = {value!r} is not known here")
        if "trial_id" not in facts:
            raise BadRequest("trial_id is missing")
        facts["try_"] = facts.pop("try", 0)
        cap = self.proxy.open(**facts)
        root = self.proxy.root_url or str(request.base_url).rstrip("/")
        return JSONResponse({"cap": cap, "base_url": f"{root}/s/{cap}/v1"}, 201)

    async def seal(self, request: Request) -> Response:
        trajectory = await self.proxy.seal(request.path_params["cap"])
        if self.on_seal:
            self.on_seal(trajectory)
        return Response(trajectory.to_json(), media_type="application/json")

    async def health(self, request: Request) -> Response:
        version, sessions = self.proxy.engine.version, self.proxy.open_sessions
        return JSONResponse({"status": "ok", "version": version, "open_sessions": sessions})

    async def metrics(self, request: Request) -> Response:
        lines = [f"nanoswe_proxy_{k}_total {v}" for k, v in sorted(self.proxy.counts.items())]
        lines.append(f"nanoswe_proxy_open_sessions {self.proxy.open_sessions}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ProxyError)
        self.proxy.counts[f"errors_{error.status}"] += 1
        return JSONResponse(error.body(), error.status)

    async def not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        shaped = BadRequest(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(shaped.body(), error.status_code)


def create_app(
    proxy: Proxy, *, control: bool = True, on_seal: Callable[[Trajectory], None] | None = None
) -> Starlette:
    """The ASGI application. `control` adds the routes that open and seal sessions; keep agents away
    from them.
    """
    to = _Routes(proxy, on_seal)
    routes = [
        Route("/s/{cap}/v1/chat/completions", to.chat, methods=["POST"]),
        Route("/s/{cap}/v1/models", to.models),
        Route("/healthz", to.health),
        Route("/metrics", to.metrics),
    ]
    if control:
        routes += [
            Route("/sessions", to.open, methods=["POST"]),
            Route("/sessions/{cap}/seal", to.seal, methods=["POST"]),
        ]
    return Starlette(
        routes=routes, exception_handlers={ProxyError: to.error, HTTPException: to.not_found}
    )


@asynccontextmanager
async def serve(
    proxy: Proxy, host: str = "127.0.0.1", port: int = 0, *, app: Starlette | None = None
) -> AsyncIterator[str]:
    """Run uvicorn in this event loop; yields the root URL. Agents' routes only, unless `app` says
    otherwise.
    """
    config = uvicorn.Config(
        app or create_app(proxy, control=False),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        # longer than clients keep an idle connection (httpx: 5 s): else a request meets its closing
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    with socket.create_server((host, port), backlog=2048) as listener:
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


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process belongs to whoever runs the loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> bytes:
    limit = MAX_BODY_BYTES
    if int(request.headers.get("content-length") or 0) > limit:
        raise TooLarge(f"the body is larger than {limit} bytes")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise TooLarge(f"the body is larger than {limit} bytes")
    except ClientDisconnect as error:
        raise BadRequest("the client went away before its request was complete") from error
    return bytes(body)
