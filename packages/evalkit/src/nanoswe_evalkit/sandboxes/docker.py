"""`docker`: a container per sandbox, through the SDK; the only file that imports it.

In: a task with a docker_image, a checkout that replaces the image's work directory (or None),
limits. Out: exact bytes and exit codes. No network, bounded memory and processes, labelled, removed
by force. A command's leftover processes are killed when it ends. Refuses (SandboxError) a missing
daemon or image.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils.socket import frames_iter

import docker
from nanoswe_evalkit.sandboxes import base
from nanoswe_evalkit.sandboxes.base import Command, Limits, Sandbox, SandboxError
from nanoswe_harbor.task import Task

T = TypeVar("T")
# asyncio's own pool has as few as five threads, and each command here holds two.
_threads = ThreadPoolExecutor(max_workers=1024)


class DockerSandbox(Sandbox):
    """One container; files anywhere in it persist until `stop`."""

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        super().__init__(task, checkout, limits)
        self._client: Any = None
        self._container: Any = None
        self._sidecar: Any = None

    @staticmethod
    async def probe(work: Path) -> None:
        """Raise SandboxError unless a daemon answers."""
        await _call(_sweep)

    async def _start(self) -> None:
        self._client = await _call(_connect)
        await _call(self._create)

    async def _stop(self) -> None:
        for container in filter(None, (self._container, self._sidecar)):
            with suppress(NotFound):
                await _call(partial(container.remove, force=True, v=True))
        self._container = self._sidecar = None
        if self._client is not None:
            await _call(self._client.close)

    async def _begin(self, command: Command, capture: base.Capture) -> base.Running:
        argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *command.argv]
        if self._shells:  # then this command can't be killed by killing everything
            argv = ["timeout", "-s", "KILL", str(command.timeout_sec + 1), *argv]
        exec_id, stream = await self._exec(command, argv)
        sending = _call(lambda: _send(stream, command.stdin))
        output = asyncio.gather(sending, _call(lambda: _receive(stream, capture)))
        ended = asyncio.ensure_future(self._ended(exec_id))
        return base.Running(ended, output, capture, exec_id)

    async def _finish(self, running: base.Running) -> None:
        """Kill all until the command is gone: the daemon answers before its process has begun."""
        while not self._shells:
            await self._kill_all()
            if (await asyncio.wait((running.ended,), timeout=0.2))[0]:
                break
        await running.output  # which the end of what the command left running ends too
        await running.ended

    @asynccontextmanager
    async def _terminal(self, command: Command) -> AsyncIterator[int]:
        _, terminal = await self._exec(command, command.argv, tty=True)
        try:
            yield terminal._sock.fileno()
        finally:
            await asyncio.shield(self._kill_all())
            _close(terminal)

    async def _exec(
        self, command: Command, argv: Sequence[str], tty: bool = False
    ) -> tuple[str, Any]:
        """Start a command. (its id, its socket)"""
        api, env = self._client.api, dict(command.env)
        options: Any = {"environment": env, "workdir": command.cwd, "stdin": True, "tty": tty}
        created = await _call(lambda: api.exec_create(self._container.id, argv, **options))
        exec_id = created["Id"]
        return exec_id, await _call(lambda: api.exec_start(exec_id, socket=True, tty=tty))

    async def _ended(self, exec_id: str) -> int:
        pause_sec = 0.005
        while True:
            state = await _call(lambda: self._client.api.exec_inspect(exec_id))
            if not state["Running"] and state["ExitCode"] is not None:
                return int(state["ExitCode"])
            await asyncio.sleep(pause_sec)
            pause_sec = min(2 * pause_sec, 0.2)

    async def _kill_all(self) -> None:
        # Inside the container, `kill -1` reaches everything but its pid 1 and the killer itself.
        await _call(lambda: self._container.exec_run(["sh", "-c", "kill -9 -1"], user="root"))

    def _create(self) -> None:
        limits, file_bytes = self.limits, self.limits.file_mb * base.MIB
        memory = limits.memory_mb * base.MIB  # asked for, and the most there is
        image = self.task.docker_image
        if image.startswith("/"):  # a folder with a Dockerfile
            image = self._client.images.build(path=image, rm=True)[0].id
        try:
            self._container = self._client.containers.create(
                image, [], entrypoint=["sh", "-c", base.IDLE, base.IDLE],
                network_mode=self._network(), mem_reservation=memory, mem_limit=memory,
                memswap_limit=memory, pids_limit=limits.processes,
                ulimits=[docker.types.Ulimit(name="fsize", soft=file_bytes, hard=file_bytes)],
                security_opt=["no-new-privileges"], environment=base.ENVIRONMENT,
                labels=base.labels(self.task)
            )  # fmt: skip
        except ImageNotFound as error:
            missing = f"no image {image}; build it, or docker pull it"
            raise SandboxError(f"{missing} ({error.explanation})") from error
        self._container.start()
        if self._sidecar is not None:
            self._container.put_archive("/etc", b"".join(self._sidecar.get_archive(base.CA)[0]))
        if self.checkout is not None:
            workdir = self.task.workdir
            empty = ["sh", "-c", 'rm -rf "$0"; mkdir -p "$0"', workdir]
            self._container.exec_run(empty, user="root", workdir="/")
            with base.pack(self.checkout) as tar:
                self._container.put_archive(workdir, tar.stdout)

    def _network(self) -> str:
        """None; or that of a sidecar, which has no other, where the tests expect one."""
        if (image := base.FIXTURES.get(self.task.repo)) is None:
            return "none"
        self._sidecar = self._client.containers.run(
            image, detach=True, network_mode="none", cap_add=["NET_ADMIN"],
            extra_hosts=dict.fromkeys(base.HOSTS, "127.0.0.1"), labels=base.labels(self.task)
        )  # fmt: skip
        ready = ["timeout", "60", "sh", "-c", "until [ -e /tmp/ready ]; do sleep 0.05; done"]
        if self._sidecar.exec_run(ready).exit_code:
            raise SandboxError(f"{image}: did not start; see docker/fixture")
        return f"container:{self._sidecar.id}"


async def _call(function: Callable[[], T]) -> T:
    """Run a blocking SDK call in a thread; its errors are ours."""
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads, function)
    except NotFound:
        raise
    except (APIError, DockerException, OSError) as error:
        text = " ".join(str(error).split())
        raise SandboxError(f"docker: {text}") from error


def _connect() -> Any:
    try:
        client = docker.from_env()
        client.ping()
    except (DockerException, OSError) as error:
        text = " ".join(str(error).split())
        remedy = "start one (or set DOCKER_HOST), or choose sandbox.kind=bwrap or daytona"
        raise SandboxError(f"docker: no daemon answers; {remedy} ({text})") from error
    return client


def _sweep() -> None:
    """Remove what harnesses of this machine left behind that are gone, killed for example."""
    ours: Any = {"all": True, "ignore_removed": True, "filters": {"label": base.OWNER}}
    with closing(_connect()) as client:
        for container in client.containers.list(**ours):
            if base.is_left(container.labels):
                with suppress(APIError):  # another harness may be at it
                    container.remove(force=True, v=True)


def _send(stream: Any, stdin: bytes) -> None:
    with suppress(OSError):  # the command may end without reading its input
        stream._sock.sendall(stdin)
        stream._sock.shutdown(socket.SHUT_WR)


def _receive(stream: Any, capture: base.Capture) -> None:
    for _, data in frames_iter(stream, tty=False):
        capture.feed(data)
    _close(stream)


def _close(stream: Any) -> None:
    sock = stream._sock
    stream._response.close()
    sock.close()
