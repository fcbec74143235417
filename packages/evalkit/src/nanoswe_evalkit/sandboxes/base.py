"""The `Sandbox` protocol, its limits and results, and the check every tar file passes.

In: a task, its checkout (or None where an image brings one) and limits. Out: exact bytes and exit
codes of commands. A sandbox has no network, and a command's leftover processes die with it.
Refuses (SandboxError) tar members that are absolute, climb by `..`, link out or are devices.
"""

import asyncio
import io
import posixpath
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_harbor.task import Task

NO_ENV: Mapping[str, str] = {}
TIMED_OUT = 124
MIB = 1024 * 1024
# Scripts for `sh -c`; "$0" is the folder, or the path.
PUT = 'mkdir -p "$0" && exec tar -xf - --no-same-owner -C "$0"'
GET = 'exec 2>/dev/null; exec tar -cf - -C "$(dirname "$0")" -- "$(basename "$0")"'

# Pid 1: reaps orphans, and starts its sleep again when `kill -1` ends it. While a fork bomb leaves
# no room for that sleep the shell gives up; the trap then starts it again in the same process.
IDLE = """trap 'exec sh -c "$0" "$0"' EXIT; while :; do sleep 3600 & wait $!; done"""
# `exit` leads to a fresh bash in the same terminal, not to the end of what runs beside it.
# It waits for a first line, so that nothing it says is lost before anybody listens.
SHELL = ("bash", "-c", "read -r _; while :; do bash -i; done")
SHELL_ENV = {"TERM": "xterm-256color", "PAGER": "cat", "GIT_PAGER": "cat"}


class SandboxError(EvalkitError):
    """The sandbox itself failed; never the command that ran in it."""


@dataclass(frozen=True)
class Limits:
    """What one command may use. `file_mb` bounds each file and each tmpfs."""

    timeout_sec: float = 60
    memory_mb: int = 1024
    processes: int = 64
    output_bytes: int = 65536
    file_mb: int = 256


@dataclass(frozen=True)
class ExecResult:
    """`stdout` holds stderr too, in the order written; 124 and `timed_out` when it ran too long."""

    exit_code: int
    stdout: bytes
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class Command:
    """What to run, every default filled in but the folder: None is the work directory."""

    argv: Sequence[str]
    stdin: bytes
    env: Mapping[str, str]
    cwd: str | None
    timeout_sec: float
    output_bytes: int


class Sandbox(ABC):
    """A place to run commands on one task's repository.

    What a command leaves running is killed when it ends; while a shell is open, when that is left.
    """

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        self.task, self.checkout, self.limits = task, checkout, limits

    @staticmethod
    @abstractmethod
    async def probe(work: Path) -> None:
        """Raise SandboxError unless this kind starts on this machine."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    async def _run(self, command: Command) -> ExecResult: ...

    @abstractmethod
    def shell(self, env: Mapping[str, str] = NO_ENV) -> AbstractAsyncContextManager[int]:
        """A terminal with an interactive bash, as a file descriptor; commands may run beside it."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] = NO_ENV,
        cwd: str | None = None,
        timeout_sec: float | None = None,
        output_bytes: int | None = None,
    ) -> ExecResult:
        seconds = timeout_sec or self.limits.timeout_sec
        size = output_bytes or self.limits.output_bytes
        return await self._run(Command(argv, stdin, env, cwd, seconds, size))

    async def put(self, tar: bytes, dest: str) -> None:
        check_tar(tar)
        done = await self.run(["sh", "-c", PUT, dest], stdin=tar)
        if done.exit_code:
            raise SandboxError(f"cannot unpack in {dest}: {done.stdout.decode(errors='replace')}")

    async def get(self, path: str) -> bytes:
        limit = self.limits.file_mb * MIB
        done = await self.run(["sh", "-c", GET, path], output_bytes=limit)
        if done.exit_code or done.truncated:
            raise SandboxError(f"{path}: cannot be read, or is larger than {limit} bytes")
        check_tar(done.stdout)
        return done.stdout


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


async def pump(process: asyncio.subprocess.Process, stdin: bytes, capture: Capture) -> None:
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

    await asyncio.gather(feed(), read(), process.wait())


def check_tar(data: bytes) -> None:
    """Raise SandboxError unless every member stays below the folder it is unpacked in."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = tar.getmembers()
    except tarfile.TarError as error:
        raise SandboxError(f"not a tar file: {error}") from error
    links: set[str] = set()
    for member in members:
        name = posixpath.normpath(member.name)
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise SandboxError(f"tar member {member.name!r} is a device or a pipe; refused")
        # Symbolic links resolve against their own folder, hard links against the top.
        base = posixpath.dirname(name) if member.issym() else ""
        target = posixpath.normpath(posixpath.join(base, member.linkname or "."))
        parents = {name[:i] for i, char in enumerate(name) if char == "/"}
        if _climbs(name) or _climbs(target) or parents & links:
            raise SandboxError(f"tar member {member.name!r} leads out of the folder; refused")
        if member.issym():
            links.add(name)


def _climbs(path: str) -> bool:
    return path.startswith("/") or path.split("/", 1)[0] == ".."
