"""`bwrap`: rootless, no daemon; one bubblewrap process per command (about 15 ms).

In: a task, its checkout as the read-only lower layer, limits. Out: exact bytes and exit codes; what
commands leave in the work directory persists in an overlay, and nothing else does (`/tmp` is fresh
each time). What is visible: bwrap_view.py. No network.
Limits bind because a harness running as root gives every live sandbox an ordinary uid of its own.
Refuses (SandboxError) a kernel that forbids it, and a task without a checkout.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from nanoswe_evalkit.sandboxes.base import (
    MIB,
    SHELL,
    SHELL_ENV,
    TIMED_OUT,
    Capture,
    Command,
    ExecResult,
    Limits,
    Sandbox,
    SandboxError,
    pump,
)
from nanoswe_evalkit.sandboxes.bwrap_view import (
    IS_ROOT,
    SLOTS,
    bwrap_path,
    entrance,
    environment,
    make_etc,
    options_for,
    uid_of,
    wrapper,
)
from nanoswe_evalkit.sandboxes.processes import children, exited, kill, tree, tree_rss_bytes
from nanoswe_harbor.task import Task

WATCH_SEC = 0.2
GRACE_SEC = 1.0
START_SEC = 20.0
OOM_EXIT = 137

_live_slots: set[int] = set()


class BwrapSandbox(Sandbox):
    """One task's repository; state lives in the upper layer of an overlay until `stop`."""

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        if checkout is None:
            raise SandboxError(f"{task.task_id}: bwrap needs a checkout; set tasks.mirror")
        super().__init__(task, checkout, limits)
        self.lower = checkout
        self.slot = -1
        self.scratch: Path | None = None
        self._shell_pid = 0

    @staticmethod
    async def probe(work: Path) -> None:
        """Raise SandboxError unless the whole form used here starts on this machine."""
        work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=work) as folder:
            lower = Path(folder, "lower")
            lower.mkdir()
            options = options_for(lower, _scratch(Path(folder), 0), "/testbed", Limits())
            command = [bwrap_path(), *options, "--", *wrapper(0, Limits()), "true"]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True)
            _make_removable(Path(folder))
        if done.returncode:
            message = " ".join(done.stderr.decode(errors="replace").split())
            raise SandboxError(f"{message}; allow user namespaces, or run as root")

    async def start(self) -> None:
        self.slot = next((slot for slot in range(SLOTS) if slot not in _live_slots), -1)
        if self.slot < 0:
            raise SandboxError(f"{SLOTS} sandboxes are live already; lower eval.concurrency")
        _live_slots.add(self.slot)
        # Beside the checkout, so on its filesystem: inode numbers stay, and git trusts its index.
        self.scratch = _scratch(self.lower.parent, self.slot)

    async def stop(self) -> None:
        _live_slots.discard(self.slot)
        if self.scratch is not None:
            scratch, self.scratch = self.scratch, None
            await asyncio.to_thread(_remove, scratch)

    async def _run(self, command: Command) -> ExecResult:
        if self.scratch is None:
            raise SandboxError("the sandbox is not started")
        capture, beside = Capture(command.output_bytes), self._shell_pid > 0
        with _memory_file("") as status:
            spawning = asyncio.ensure_future(self._spawn(command, status))
            try:
                process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                # asyncio would kill bwrap alone, whose half-made child then waits for it forever.
                kill(process := await spawning)
                await pump(process, b"", capture)
                raise
            memory_bytes = self.limits.memory_mb * MIB
            cut = await _finish(process, command, capture, memory_bytes, beside)
            exit_code = cut or _status(status).get("exit-code")
        if beside and exit_code is None:
            exit_code = process.returncode
        if exit_code is None:
            raise SandboxError(f"bwrap failed: {capture.value().decode(errors='replace').strip()}")
        return ExecResult(exit_code, capture.value(), cut == TIMED_OUT, capture.dropped > 0)

    async def _spawn(
        self, command: Command, status: int, tty: int | None = None
    ) -> asyncio.subprocess.Process:
        """Start a command in a bwrap of its own or, while there is a shell, beside that."""
        assert self.scratch is not None
        stdin = asyncio.subprocess.PIPE if command.stdin else asyncio.subprocess.DEVNULL
        start = partial(
            asyncio.create_subprocess_exec,
            env={**environment(), **command.env},
            stdin=tty or stdin,
            stdout=tty or asyncio.subprocess.PIPE,
            stderr=tty or asyncio.subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is for the harness alone
        )
        argv = [*wrapper(self.slot, self.limits), *command.argv]
        cwd = command.cwd or self.task.workdir
        if self._shell_pid:
            with entrance(self._shell_pid) as (enter, fds):
                return await start(*enter, "env", f"--chdir={cwd}", *argv, pass_fds=fds)
        options = options_for(self.lower, self.scratch, self.task.workdir, self.limits)
        with _memory_file("\0".join([*options, "--chdir", cwd])) as args:
            bwrap = [bwrap_path(), "--args", str(args), "--json-status-fd", str(status), "--"]
            return await start(*bwrap, *argv, pass_fds=(args, status))

    @asynccontextmanager
    async def shell(self) -> AsyncIterator[int]:
        command = Command(["setsid", "--ctty", *SHELL], b"", SHELL_ENV, None, 0, 0)
        terminal, tty = os.openpty()
        try:
            with _memory_file("") as status:
                process = await self._spawn(command, status, tty)
                os.close(tty)
                try:
                    self._shell_pid = await _first_child(process.pid)
                    loop = await _first_child(self._shell_pid)
                    watcher = asyncio.ensure_future(self._watch(self._shell_pid, loop))
                    yield terminal
                    watcher.cancel()
                finally:
                    self._shell_pid = 0
                    kill(process)
                    await process.wait()
        finally:
            os.close(terminal)

    async def _watch(self, init: int, loop: int) -> None:
        """When all in the shell's sandbox use too much memory, end all but its bash."""
        while True:
            await asyncio.sleep(WATCH_SEC)
            if tree_rss_bytes(init) > self.limits.memory_mb * MIB:
                for pid in set(tree(init)) - {init, loop, *children(loop)[:1]}:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


async def _first_child(pid: int) -> int:
    """Of a process that is about to have one: a sandbox's init, then what that runs."""
    deadline = asyncio.get_running_loop().time() + START_SEC
    while not (found := children(pid)):
        if asyncio.get_running_loop().time() > deadline:
            raise SandboxError("no shell started in the sandbox")
        await asyncio.sleep(0.002)
    return found[0]


async def _finish(
    process: asyncio.subprocess.Process,
    command: Command,
    capture: Capture,
    memory_bytes: int,
    beside: bool,
) -> int | None:
    """See the process to its end, or end its whole tree; the exit code, if we forced one.

    Beside a shell, what it left running lives on, and may hold its output open.
    """

    async def watch() -> int:
        deadline = asyncio.get_running_loop().time() + command.timeout_sec
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(WATCH_SEC, left))
            if tree_rss_bytes(process.pid) > memory_bytes:
                capture.feed(f"\n[killed: more than {memory_bytes} bytes of memory]\n".encode())
                return OOM_EXIT
        return TIMED_OUT

    done = asyncio.ensure_future(pump(process, command.stdin, capture))
    ended = asyncio.ensure_future(exited(process)) if beside else done
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((ended, watcher), return_when=asyncio.FIRST_COMPLETED)
        return None if ended.done() else watcher.result()
    finally:
        watcher.cancel()
        if process.returncode is None:
            kill(process)
        await asyncio.wait((done,), timeout=GRACE_SEC if beside else None)
        done.cancel()


def _status(fd: int) -> dict[str, int]:
    merged: dict[str, int] = {}
    for line in os.pread(fd, 4096, 0).splitlines():
        with suppress(ValueError):  # the last line may still be half-written
            merged.update(json.loads(line))
    return merged


@contextmanager
def _memory_file(text: str) -> Iterator[int]:
    fd = os.memfd_create("bwrap")
    try:
        os.write(fd, os.fsencode(text))
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _scratch(parent: Path, slot: int) -> Path:
    make_etc(parent)
    scratch = Path(tempfile.mkdtemp(prefix=".live-", dir=parent))
    for name in ("upper", "work"):
        (scratch / name).mkdir()
        if IS_ROOT:
            os.chown(scratch / name, uid_of(slot), uid_of(slot))
    return scratch


def _remove(scratch: Path) -> None:
    _make_removable(scratch)
    shutil.rmtree(scratch)


def _make_removable(folder: Path) -> None:
    """The kernel and the agent may leave folders that their owner can't enter."""
    if not IS_ROOT:
        for root, folders, _ in os.walk(folder):
            for name in folders:
                path = Path(root, name)
                if not path.is_symlink():
                    path.chmod(0o700)
