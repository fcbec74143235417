"""The `Sandbox` base class, its limits and results.

In: a task, its checkout (or None where an image brings one) and limits. Out: exact bytes and exit
codes of commands. A sandbox has no network. Refuses nothing: what fails is a SandboxError.
"""

import asyncio
import os
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_harbor.task import Task

NO_ENV: Mapping[str, str] = {}
TIMED_OUT = 124
MIB = 1024 * 1024
ARG_BYTES = 128 * 1024  # Linux takes no longer argument
UNRUNNABLE = "cannot be run: longer than 128 KiB, or a NUL or half a character is in it\n"
TASK, OWNER = "nanoswe.task", "nanoswe.harness"  # labels
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
# Repositories whose tests expect a network, and the image of docker/fixture that plays it.
FIXTURES = {"psf/requests": "nanoswe/fixture:dev"}
HOSTS = ("httpbin.org", "www.google.co.uk")  # the second is where a test is redirected to
CA = "/fixture/nanoswe-ca.pem"  # what run_eval.sh trusts, where it is in the tests' /etc

# Pid 1: reaps orphans, and starts its sleep again when `kill -1` ends it. While a fork bomb leaves
# no room for that sleep the shell gives up; the trap then starts it again in the same process.
IDLE = """trap 'exec sh -c "$0" "$0"' EXIT; while :; do sleep 3600 & wait $!; done"""
# `exit` leads to a fresh bash in the same terminal, not to the end of what runs beside it.
# It waits for a first line, before which nobody listens.
SHELL = ("bash", "-c", "read -r _; while :; do bash -i; done")
SHELL_ENV = {"TERM": "xterm-256color", "PAGER": "cat", "GIT_PAGER": "cat"}


class SandboxError(EvalkitError):
    """The sandbox itself failed; never the command that ran in it."""


@dataclass(frozen=True)
class Limits:
    """What one command may use. `file_mb` bounds each file and each tmpfs. `images`: the store of
    `image unpack` where bwrap finds the tasks' images; without one it has this machine's /usr."""

    timeout_sec: float = 60
    memory_mb: int = 1024
    processes: int = 64
    output_bytes: int = 65536
    file_mb: int = 256
    images: str = ""


@dataclass(frozen=True)
class ExecResult:
    """`stdout` holds stderr too, in the order written; 124 and `timed_out` when it ran too long."""

    exit_code: int
    stdout: bytes
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class Command:
    """What to run, every default filled in."""

    argv: Sequence[str]
    stdin: bytes
    env: Mapping[str, str]
    cwd: str
    timeout_sec: float


@dataclass(frozen=True)
class Running:
    """A command that has begun: its exit code once there is one, then the end of its output."""

    ended: asyncio.Future[int]
    output: asyncio.Future[Any]
    capture: "Capture"
    handle: Any


class Sandbox(ABC):
    """A place to run commands on one task's repository.

    What a command leaves running is killed when it ends; while a shell is open, when that is left.
    """

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        self.task, self.checkout, self.limits = task, checkout, limits
        self._starting: asyncio.Future[None] | None = None
        self._shells = 0

    async def start(self) -> None:
        # A cancelled start would leave half a sandbox: `stop` waits for a whole one.
        self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def stop(self) -> None:
        if self._starting is not None:
            await asyncio.wait((self._starting,))
            self._starting = None
        await self._stop()

    @abstractmethod
    async def _start(self) -> None: ...

    @abstractmethod
    async def _stop(self) -> None: ...

    @abstractmethod
    async def _begin(self, command: Command, capture: "Capture") -> Running: ...

    @abstractmethod
    async def _finish(self, running: Running) -> None:
        """Kill a command that still runs and what it left; wait for its output."""

    def _terminal(self, command: Command) -> AbstractAsyncContextManager[int]:
        """A terminal with a command, as a file descriptor; all that runs here ends with it."""
        raise SandboxError("this sandbox has no shell; choose bwrap or docker")

    @asynccontextmanager
    async def shell(
        self, env: Mapping[str, str] = NO_ENV, argv: Sequence[str] = SHELL
    ) -> AsyncIterator[int]:
        """A terminal with an interactive bash, or what else reads a first line and then goes on.

        It is a file descriptor; commands may run beside it.
        """
        if not _is_runnable(argv, env):
            raise SandboxError(UNRUNNABLE)
        command = Command(argv, b"", {**SHELL_ENV, **env}, self.task.workdir, 0)
        async with self._terminal(command) as terminal:
            self._shells += 1
            try:
                os.write(terminal, b"\n")
                yield terminal
            finally:
                self._shells -= 1

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] = NO_ENV,
        cwd: str | None = None, timeout_sec: float | None = None, output_bytes: int | None = None
    ) -> ExecResult:  # fmt: skip
        if self._starting is None:
            raise SandboxError("the sandbox is not started")
        if not _is_runnable(argv, env):
            return ExecResult(126, UNRUNNABLE.encode())
        seconds = timeout_sec or self.limits.timeout_sec
        capture = Capture(output_bytes or self.limits.output_bytes)
        command = Command(argv, stdin, env, cwd or self.task.workdir, seconds)
        beginning = asyncio.ensure_future(self._begin(command, capture))
        try:
            running = await asyncio.shield(beginning)
            timed_out = not (await asyncio.wait((running.ended,), timeout=seconds))[0]
        except asyncio.CancelledError:
            with suppress(SandboxError):  # it may be dead, but the cancellation goes on
                await asyncio.shield(self._finish(await beginning))
            raise
        await asyncio.shield(self._finish(running))
        exit_code = TIMED_OUT if timed_out else running.ended.result()
        return ExecResult(exit_code, capture.value(), timed_out, capture.dropped > 0)


def _is_runnable(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Does a kernel start it? A model may write more than one takes, or what is no text."""
    words = [*argv, *(f"{name}={value}" for name, value in env.items())]
    with suppress(UnicodeEncodeError):
        sizes = [len(word.encode()) + 1 for word in words]
        return max(sizes) <= ARG_BYTES and sum(sizes) <= MIB and "\0" not in "".join(words)
    return False


def labels(task: Task) -> dict[str, str]:
    """What names our sandboxes outside this process."""
    return {TASK: task.task_id, OWNER: f"{socket.gethostname()}/{os.getpid()}"}


def is_left(labels: Mapping[str, str]) -> bool:
    """Did a harness of this machine make it that is gone, killed for example?"""
    host, _, pid = labels[OWNER].partition("/")
    return host == socket.gethostname() and not Path("/proc", pid).exists()


def pack(checkout: Path) -> subprocess.Popen[bytes]:
    """A tar of a checkout, owned by root, on its stdout."""
    argv = ["tar", "-cf", "-", "--numeric-owner", "--owner=0", "--group=0", "-C", str(checkout)]
    return subprocess.Popen([*argv, "."], stdout=subprocess.PIPE)


def prlimit(limits: Limits) -> list[str]:
    """What stands before a command, and binds an ordinary uid."""
    return ["prlimit", f"--nproc={limits.processes}", f"--fsize={limits.file_mb * MIB}", "--core=0"]


class Capture:
    """Keeps the first and the last half of `limit` bytes of a stream, however long it is."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0

    def feed(self, data: bytes) -> None:
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[max(room, 0) :]
        if (extra := len(self.tail) - self.half) > 0:
            del self.tail[:extra]
            self.dropped += extra

    def value(self) -> bytes:
        cut = f"\n[{self.dropped} bytes dropped]\n".encode() if self.dropped else b""
        return bytes(self.head) + cut + bytes(self.tail)


def follow(process: asyncio.subprocess.Process, stdin: bytes, capture: Capture) -> Running:
    """Feed a process, read it to the end, reap it."""

    async def feed() -> None:
        if process.stdin is not None:
            with suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(stdin)
                await process.stdin.drain()
            process.stdin.close()

    async def read() -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(65536):
            capture.feed(data)

    async def end() -> int:  # asyncio's own wait() waits for the end of the output too
        while (code := process.returncode) is None:
            await asyncio.sleep(0.002)
        return code if code >= 0 else 128 - code

    output = asyncio.gather(feed(), read(), process.wait())
    return Running(asyncio.ensure_future(end()), output, capture, process)
