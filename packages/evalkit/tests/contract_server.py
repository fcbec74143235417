"""A Daytona of our own on a local port: what the real client says over the wire is answered from
real bwrap sandboxes, and any request can be made to fail.

It follows `daytona` 0.226.1, whose clients are generated from the OpenAPI documents "Daytona" 1.0
(`daytona_api_client_async`) and "Daytona Toolbox API" v0.0.0-dev
(`daytona_toolbox_api_client_async`): /api/sandbox, /api/snapshots, and below /toolbox/ID
files/bulk-upload, files/bulk-download, process/execute and process/pty/create-connect. There is no
socket.io, so the client polls. Lists have two items a page. What the real service does and this
does not: build images (a snapshot is a name, which becomes active at the second look), and bound
memory.
"""

import asyncio
import itertools
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from nanoswe_evalkit.sandboxes.base import Command, Limits
from nanoswe_evalkit.sandboxes.bwrap import BwrapSandbox

FAULT: ContextVar[str] = ContextVar("FAULT")  # of the request that is answered
QUOTA = "Total disk limit exceeded. Maximum allowed: 30GiB.\nConsider archiving your Sandboxes."


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD /path` the pattern finds."""

    pattern: str
    kind: str  # 429, quota, 502, dropped-before, dropped-after, stuck, lost
    times: int = 1


@dataclass
class Box:
    """A sandbox of the account."""

    dto: dict[str, Any]
    sandbox: BwrapSandbox


@dataclass
class Server:
    """What the account holds, and what it was asked."""

    folder: Path
    url: str = ""
    key: str = "dtn_of-a-test"
    faults: list[Fault] = field(default_factory=list)
    boxes: dict[str, Box] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=itertools.count)

    def bodies(self, request: str) -> list[Any]:
        return [body for line, body in self.requests if line == request]

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line, _ in self.requests)

    # ---- the API ----

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if any(box.dto["name"] == body["name"] for box in self.boxes.values()):
            return error(409, f"Sandbox with name {body['name']} already exists")
        if body.get("snapshot") not in self.snapshots:
            return error(404, f"Snapshot {body.get('snapshot')} not found")
        checkout = self.folder / f"box-{(number := next(self.ids))}"
        checkout.mkdir(parents=True)
        checkout.chmod(0o777)
        task: Any = SimpleNamespace(
            workdir="/testbed", task_id="contract", docker_image="", repo=""
        )
        limits = Limits(timeout_sec=600, memory_mb=4096, processes=512, file_mb=4096)
        sandbox = BwrapSandbox(task, checkout, limits)
        await sandbox.start()
        copied = ("name", "labels", "env", "snapshot", "autoStopInterval", "autoDeleteInterval")
        dto = {key: body[key] for key in copied}
        dto |= {"id": f"id-{number}", "organizationId": "org", "user": "root", "public": False}
        dto |= {"networkBlockAll": body["networkBlockAll"], "kvm": False, "target": "local"}
        dto |= {
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }
        dto["state"] = "creating" if FAULT.get() == "stuck" else "started"
        self.boxes[dto["id"]] = Box(dto, sandbox)
        return web.json_response(dto)

    async def list(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query.get("labels", "{}")).items()
        found = [b.dto for b in self.boxes.values() if wanted <= b.dto["labels"].items()]
        start = int(request.query.get("cursor", 0))
        cursor = str(start + 2) if len(found) > start + 2 else None
        return web.json_response({"items": found[start : start + 2], "nextCursor": cursor})

    async def get(self, request: web.Request) -> web.Response:
        box = self.find(request.match_info["id"])
        return web.json_response(box.dto) if box else error(404, "Sandbox not found")

    async def delete(self, request: web.Request) -> web.Response:
        if (box := self.find(request.match_info["id"])) is None:
            return error(404, "Sandbox not found")
        if FAULT.get() != "lost":
            del self.boxes[box.dto["id"]]
            await box.sandbox.stop()
        return web.json_response({**box.dto, "state": "destroying"})

    def find(self, name: str) -> Box | None:
        boxes = self.boxes.values()
        return next((b for b in boxes if name in (b.dto["id"], b.dto["name"])), None)

    async def make_snapshot(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["name"] in self.snapshots:
            return error(409, f"Snapshot {body['name']} already exists")
        day = "2026-01-01T00:00:00Z"
        found = {"id": f"id-{next(self.ids)}", "name": body["name"], "general": False, "cpu": 1}
        found |= {"size": 1, "entrypoint": None, "gpu": 0, "mem": body.get("memory", 1), "disk": 3}
        found |= {"createdAt": day, "updatedAt": day, "lastUsedAt": None, "errorReason": None}
        self.snapshots[body["name"]] = {**found, "sourceSandboxId": None, "state": "building"}
        return web.json_response(self.snapshots[body["name"]])

    async def get_snapshot(self, request: web.Request) -> web.Response:
        found = {s[key]: s for s in self.snapshots.values() for key in ("id", "name")}
        if (snapshot := found.get(request.match_info["name"])) is None:
            return error(404, "Snapshot not found")
        if snapshot["state"] == "building":
            snapshot["state"] = "active"
        return web.json_response(snapshot)

    # ---- the toolbox of a sandbox ----

    async def execute(self, request: web.Request) -> web.Response:
        body = await request.json()
        command = Command(["bash", "-c", body["command"]], b"", body.get("envs") or {}, "/", 0)
        code, output = await self.inside(request, command, body["timeout"])
        if code is None:
            return error(408, "command execution timeout", "PROCESS_EXECUTION_TIMEOUT")
        result = output.decode("utf-8", errors="replace")
        return web.json_response({"exitCode": code, "result": result})

    async def upload(self, request: web.Request) -> web.Response:
        files: dict[str, dict[str, bytes]] = {}
        async for part in await request.multipart():
            match = re.fullmatch(r"files\[(\d+)\]\.(path|file)", part.name or "")
            assert match is not None
            files.setdefault(match[1], {})[match[2]] = bytes(await part.read())
        for one in files.values():
            script = 'mkdir -p "${0%/*}" && cat > "$0"'
            path = one["path"].decode()
            command = Command(["sh", "-c", script, path], one["file"] or b"", {}, "/", 0)
            code, output = await self.inside(request, command)
            if code:
                return web.json_response({"errors": [f"{path}: {output!r}"]}, status=400)
        return web.Response()

    async def download(self, request: web.Request) -> web.Response:
        lines = b""
        for path in (await request.json())["paths"]:
            code, data = await self.inside(request, Command(["cat", path], b"", {}, "/", 0))
            name = "error" if code else "file"
            lines += f'--bound\r\nContent-Disposition: form-data; name="{name}"; '.encode()
            lines += f'filename="{path}"\r\n\r\n'.encode() + data + b"\r\n"
        headers = {"Content-Type": "multipart/form-data; boundary=bound"}
        return web.Response(body=lines + b"--bound--\r\n", headers=headers)

    async def inside(
        self, request: web.Request, command: Command, timeout: float = 60
    ) -> tuple[int | None, bytes]:
        """As the daemon in the sandbox does: nothing that is left running is killed."""
        box = self.boxes[request.match_info["id"]]
        env = {**box.dto["env"], **command.env}
        argv, stdin, cwd = command.argv, command.stdin, command.cwd
        process = await box.sandbox._enter(Command(argv, stdin, env, cwd, 0))
        try:
            output, _ = await asyncio.wait_for(process.communicate(stdin or None), timeout)
        except TimeoutError:
            process.kill()
            await process.communicate()
            return None, b""
        return process.returncode, output

    async def terminal(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=["X-Daytona-Pty-Exit-Control"])
        await socket.prepare(request)
        master, tty = os.openpty()
        shell = ["setsid", "--ctty", "bash", "-i"]
        box, loop = self.boxes[request.match_info["id"]], asyncio.get_running_loop()
        process = await box.sandbox._enter(Command(shell, b"", box.dto["env"], "/", 0), tty)
        os.close(tty)
        await socket.send_json({"type": "control", "status": "connected"})
        shown: asyncio.Queue[bytes] = asyncio.Queue()

        def read() -> None:
            try:
                shown.put_nowait(os.read(master, 65536))
            except OSError:
                loop.remove_reader(master)

        async def show() -> None:
            while True:
                await socket.send_bytes(await shown.get())

        loop.add_reader(master, read)
        showing = asyncio.create_task(show())
        try:
            async for message in socket:
                data = message.data
                while data:  # the terminal takes a few KiB at a time
                    data = data[await asyncio.to_thread(os.write, master, data) :]
        finally:
            showing.cancel()
            loop.remove_reader(master)
            os.close(master)
            if process.returncode is None:
                process.kill()
            await process.wait()
        return socket

    # ---- what goes wrong ----

    @web.middleware
    async def inject(self, request: web.Request, handler: Any) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        json_like = request.content_type == "application/json" and request.can_read_body
        self.requests.append((line, await request.json() if json_like else None))
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return error(401, "Invalid credentials")
        found = (f for f in self.faults if f.times and re.search(f.pattern, line))
        kind = ""
        if fault := next(found, None):
            fault.times -= 1
            kind = fault.kind
        if kind == "429":
            headers = {"Retry-After-Sandbox-Create": "0.3"}
            return error(429, "Rate limit exceeded", headers=headers)
        if kind == "quota":
            return error(400, QUOTA)
        if kind == "502":
            return web.Response(status=502, text="<html>Bad Gateway</html>")
        FAULT.set(kind)
        if "/toolbox/" in line and request.match_info.get("id") not in self.boxes:
            return error(404, "Sandbox not found", source="DAYTONA_PROXY")
        response: web.StreamResponse | None = None
        if kind != "dropped-before":
            response = await handler(request)
        if kind.startswith("dropped") and request.transport is not None:
            request.transport.close()
            return web.Response()
        assert response is not None
        return response

    async def die(self, name: str) -> None:
        """The machine below a sandbox fails."""
        box = self.find(name)
        assert box is not None
        del self.boxes[box.dto["id"]]
        await box.sandbox.stop()


def error(
    status: int, message: str, code: str = "", source: str = "DAYTONA_API",
    headers: dict[str, str] | None = None
) -> web.Response:  # fmt: skip
    body = {"statusCode": status, "message": message, "code": code, "source": source}
    return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def serve(server: Server) -> AsyncIterator[None]:
    app = web.Application(middlewares=[server.inject], client_max_size=1 << 30)
    toolbox = "/toolbox/{id}"
    app.add_routes(
        [
            web.post("/api/sandbox", server.create),
            web.get("/api/sandbox", server.list),
            web.get("/api/sandbox/{id}", server.get),
            web.delete("/api/sandbox/{id}", server.delete),
            web.post("/api/snapshots", server.make_snapshot),
            web.get("/api/snapshots/{name}", server.get_snapshot),
            web.post(f"{toolbox}/process/execute", server.execute),
            web.post(f"{toolbox}/files/bulk-upload", server.upload),
            web.post(f"{toolbox}/files/bulk-download", server.download),
            web.get(f"{toolbox}/process/pty/create-connect", server.terminal),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()
        for box in server.boxes.values():
            await box.sandbox.stop()


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server in a thread and event loop of its own, for clients of any kind."""
    server, ready, loop = Server(folder), threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def main() -> None:
        async with serve(server):
            ready.set()
            await over.wait()

    def target() -> None:
        with suppress(RuntimeError), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=target)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
