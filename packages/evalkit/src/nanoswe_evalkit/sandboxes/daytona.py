"""`daytona`: a sandbox of daytona.io each, by its async client; the only file that imports it.

In: a task, its checkout (or None where an image brings one), limits; DAYTONA_API_KEY. Out: exact
bytes and exit codes, though any answer of the service may be lost: a command is a script under a
name of its own, which control.sh starts once. No network; a sandbox that stays behind is swept
away, or ends by its time to live. Refuses (SandboxError) a missing key, a spent quota, and agents
that live inside.
"""

import asyncio
import logging
import math
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import daytona as sdk

from nanoswe_evalkit.sandboxes import base
from nanoswe_evalkit.sandboxes.base import Command, Limits, Sandbox, SandboxError
from nanoswe_harbor.task import content_digest

T = TypeVar("T")
log = logging.getLogger(__name__)
ANY, RUN = "nanoswe.sandbox", "nanoswe.run"  # labels
FOLDER = "/tmp/.nanoswe"
CONTROL = Path(__file__).with_name("control.sh").read_bytes()
FILL = 'mkdir -p "$0" && find "$0" -mindepth 1 -delete && tar -xf - --no-same-owner -C "$0"'
TROUBLE = (429, 500, 502, 503, 504)
HINTS = {
    "^401": "set DAYTONA_API_KEY to a key that works",
    "^40[03].*(quota|limit exceeded)": "no rate limit: lower eval.concurrency, or free some",
    "^no answer": "see DAYTONA_API_URL",
}
LEAVING = ("destroyed", "destroying")
EXISTS = (sdk.DaytonaNotFoundError, sdk.DaytonaConflictError)  # or does not
WAIT_SEC, CREATE_SEC, SNAPSHOT_SEC, SPARE_MINUTES = 20, 120, 3600, 60
TRIES, MOST_PAUSE_SEC = 6, 60.0
CREATES_PER_SEC, BURST = 5.0, 10
_turn = 0.0  # of the next create: all sandboxes share the account's bucket


class DaytonaSandbox(Sandbox):
    """One sandbox of the account, and a client; files anywhere in it persist until `stop`."""

    _client: sdk.AsyncDaytona | None = None
    _box: Any = None
    _born = ""

    @staticmethod
    async def probe(work: Path) -> None:
        """Raise SandboxError unless the account answers; sweep what dead harnesses left there."""
        async with _connect() as client:
            await _sweep(client, {ANY: "1"}, base.is_left)

    async def _start(self) -> None:
        self._client, run = _connect(), secrets.token_hex(8)
        self._labels = {**base.labels(self.task), ANY: "1", RUN: run}
        minutes = math.ceil((self.task.agent_timeout_sec + self.task.verifier_timeout_sec) / 60)
        params = sdk.CreateSandboxFromSnapshotParams(
            name=f"nanoswe-{run}",
            snapshot=await _snapshot(self._client, self.task.docker_image, self.limits),
            labels=self._labels, env_vars=base.ENVIRONMENT, network_block_all=True,
            auto_stop_interval=0, ephemeral=True, ttl_minutes=minutes + SPARE_MINUTES
        )  # fmt: skip
        self._box = await call(partial(_create, self._client, params))
        await self._upload({})
        self._born = (await self._control("born")).strip()
        if self.checkout is not None:
            with base.pack(self.checkout) as tar:
                data = await asyncio.to_thread(tar.communicate)
            argv = ["sh", "-c", FILL, self.task.workdir]
            filled = await self.run(argv, stdin=data[0], cwd="/")
            if filled.exit_code:
                raise SandboxError(f"daytona: no checkout: {filled.stdout.decode()}")

    async def _stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            async with client:
                await _sweep(client, {RUN: self._labels[RUN]}, known=self._box)

    async def _begin(self, command: Command, capture: base.Capture) -> base.Running:
        name = secrets.token_hex(8)
        script = f"exec 2>&1; echo $$ >{name}.main\n{self._script(command)}"
        await self._upload({f"{name}.sh": os.fsencode(script), f"{name}.in": command.stdin})
        ended = asyncio.ensure_future(self._ended(name, WAIT_SEC, capture))
        return base.Running(ended, ended, capture, name)

    async def _finish(self, running: base.Running) -> None:
        name, capture = running.handle, running.capture
        if running.ended.done():
            running.ended.result()
        else:
            running.ended.cancel()
            await self._ended(name, 0, capture)
        paths = [f"{FOLDER}/{name}.{part}" for part in ("head", "tail")]
        wanted = [sdk.FileDownloadRequest(source=path) for path in paths]
        head, tail = await call(lambda: self._box.fs.download_files(wanted))
        capture.head += head.result or b""
        capture.tail += tail.result or b""

    async def _ended(self, name: str, seconds: int, capture: base.Capture) -> int:
        """Ask until the command has ended, or kill it, in 0 seconds; its exit code."""
        which, strange = "own" if self._shells else "all", 0
        while strange < TRIES:
            answer = await self._control(f"{name} {self._born} {which} {seconds} {capture.half}")
            if found := re.fullmatch(r"(\d+) (\d+)\n", answer):
                capture.dropped = max(0, int(found[2]) - capture.half)
                return int(found[1])
            # What asks is killed too by a command that kills everything, or removes our folder.
            strange = 0 if answer == "running\n" else strange + 1
        return 137

    async def _kill_all(self) -> None:
        await self._control(f"- {self._born} all 0 0")

    async def _upload(self, files: Mapping[str, bytes]) -> None:
        files = {"control.sh": CONTROL, **files}  # it may have been removed
        wanted = [sdk.FileUpload(data, f"{FOLDER}/{name}") for name, data in files.items()]
        await call(lambda: self._box.fs.upload_files(wanted))

    async def _control(self, arguments: str) -> str:
        line = f"sh {FOLDER}/control.sh {arguments}"
        done = await call(lambda: self._box.process.exec(line, timeout=3 * WAIT_SEC))
        return str(done.result)

    def _script(self, command: Command) -> str:
        env = [f"{name}={value}" for name, value in command.env.items()]
        argv = ["env", *env, *base.prlimit(self.limits), *command.argv]
        return f"cd {shlex.quote(command.cwd)} || exit 1\nexec {shlex.join(argv)}\n"

    @asynccontextmanager
    async def _terminal(self, command: Command) -> AsyncIterator[int]:
        if command.argv is not base.SHELL:
            raise SandboxError("no agent lives inside daytona; choose bwrap or docker for it")
        name, mark, (near, far) = secrets.token_hex(8), secrets.token_hex(8), socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        show = partial(loop.sock_sendall, near)

        async def type_in() -> None:
            while data := await loop.sock_recv(near, 65536):
                await terminal.send_input(data)

        with near, far:
            script = f"echo {mark}\n{self._script(command)}"
            await self._upload({f"{name}.sh": os.fsencode(script)})
            terminal = await call(lambda: self._box.process.create_pty_session(name, show))
            typing = asyncio.ensure_future(type_in())
            try:
                await terminal.send_input(f" exec sh {FOLDER}/{name}.sh\n")
                shown = b""  # the prompt of another shell, and us, before the mark
                while mark.encode() not in shown:
                    shown += await asyncio.wait_for(loop.sock_recv(far, 65536), WAIT_SEC)
                far.setblocking(True)
                yield far.fileno()
            finally:
                await asyncio.shield(self._kill_all())
                typing.cancel()
                await terminal.disconnect()


def _connect() -> sdk.AsyncDaytona:
    try:
        return sdk.AsyncDaytona()
    except sdk.DaytonaAuthenticationError as error:
        text = "daytona: set DAYTONA_API_KEY (and DAYTONA_API_URL for a service of your own)"
        raise SandboxError(text) from error


async def _sweep(
    client: sdk.AsyncDaytona,
    labels: dict[str, str],
    wanted: Callable[[dict[str, str]], bool] = bool,
    known: Any = None,
) -> None:
    """Delete until nothing is left: an answer can be lost, of a delete or of the create before."""

    async def left() -> list[sdk.AsyncSandbox]:
        boxes = client.list(sdk.ListSandboxesQuery(labels=labels))
        return [b async for b in boxes if b.state not in LEAVING and wanted(b.labels)]

    boxes = [known] if known else []
    for attempt in range(TRIES):
        for box in boxes:
            with suppress(*EXISTS):
                await call(box.delete, *EXISTS)
        if not (boxes := await call(left)):
            return
        await asyncio.sleep(0.1 * 2**attempt)
    log.warning("daytona: %d sandboxes do not go; their time to live ends them", len(boxes))


async def _snapshot(client: sdk.AsyncDaytona, image: str, limits: Limits) -> str:
    """That of an image, or of a folder with a Dockerfile: made once, under its digest."""
    gib, folder = math.ceil(limits.memory_mb / 1024), image.startswith("/")
    paths = [path for path in Path(image).rglob("*") if path.is_file()] if folder else []
    files = {str(path.relative_to(image)): path.read_bytes() for path in paths}
    make = sdk.Image.from_dockerfile(f"{image}/Dockerfile") if folder else sdk.Image.base(image)
    digest = content_digest({**files, f"{make.dockerfile()}{gib}": b""})
    name = f"nanoswe-{digest.removeprefix('sha256:')[:32]}"
    made = sdk.CreateSnapshotParams(name=name, image=make, resources=sdk.Resources(memory=gib))
    for _ in range(SNAPSHOT_SEC):
        try:
            known = await call(lambda: client.snapshot.get(name), *EXISTS)
        except sdk.DaytonaNotFoundError:
            with suppress(sdk.DaytonaConflictError):  # another was quicker, or an answer was lost
                await call(lambda: client.snapshot.create(made), *EXISTS)
            continue
        if known.state == "active":
            return name
        if known.state in ("error", "build_failed"):
            text = f"{image} failed ({known.error_reason}); delete snapshot {name} to try again"
            raise SandboxError(f"daytona: {text}")
        if known.state == "inactive":
            await call(lambda: client.snapshot.activate(name))
        await asyncio.sleep(1)
    raise SandboxError(f"daytona: snapshot {name} is not ready after {SNAPSHOT_SEC} s")


async def _create(
    client: sdk.AsyncDaytona, params: sdk.CreateSandboxFromSnapshotParams
) -> sdk.AsyncSandbox:
    """In turn. A name is made once, so that a lost answer costs nothing."""
    global _turn
    now = time.monotonic()
    _turn = max(_turn, now - BURST / CREATES_PER_SEC) + 1 / CREATES_PER_SEC
    await asyncio.sleep(max(0, _turn - now))
    try:
        return await client.create(params, timeout=CREATE_SEC)
    except sdk.DaytonaConflictError:
        box = await client.get(str(params.name))
        await box.wait_for_sandbox_start(CREATE_SEC)
        return box
    except sdk.DaytonaRateLimitError as error:
        _turn = max(_turn, now + _pause_sec(error, 0))
        raise


async def call(make: Callable[[], Awaitable[T]], *passing: type[Exception]) -> T:
    """Again, within a bound, where the service has trouble. Its errors are ours, but `passing`."""
    for attempt in range(TRIES):
        try:
            return await make()
        except passing:
            raise
        except sdk.DaytonaError as error:
            last = error
            status = error.status_code or getattr(error.__cause__, "status", None)
            if status not in TROUBLE and not isinstance(error, sdk.DaytonaConnectionError):
                break
            await asyncio.sleep(_pause_sec(error, attempt))
    said = " ".join(f"{status or 'no answer'}: {last}".split())
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, said, re.IGNORECASE)]
    raise SandboxError("; ".join([f"daytona: {said}", *hints])) from last


def _pause_sec(error: sdk.DaytonaError, attempt: int) -> float:
    named = [v for k, v in error.headers.items() if k.lower().startswith("retry-after")]
    return min(float(named[0]) if named else 0.2 * 2**attempt, MOST_PAUSE_SEC)
