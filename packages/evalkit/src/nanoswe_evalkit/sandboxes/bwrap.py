"""`bwrap`: rootless, no daemon; one bubblewrap a sandbox, which commands join (about 5 ms each).

In: a task, its checkout as the read-only lower layer, limits. Out: exact bytes and exit codes. What
commands leave in the work directory (an overlay) and in `/tmp` persists until `stop`; what they
leave running does not. What is visible: bwrap_view.py. No network.
Limits bind because a harness running as root gives every live sandbox an ordinary uid of its own.
Refuses (SandboxError) a kernel that forbids it, and a task without a checkout.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanoswe_evalkit.sandboxes.base import (
    IDLE,
    MIB,
    NO_ENV,
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
from nanoswe_harbor.task import Task

WATCH_SEC = 0.2
GRACE_SEC = 1.0
START_SEC = 20.0
OOM_EXIT = 137

_live_slots: set[int] = set()


class BwrapSandbox(Sandbox):
    """One task's repository, in the namespaces of a process that only waits."""

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        if checkout is None:
            raise SandboxError(f"{task.task_id}: bwrap needs a checkout; set tasks.mirror")
        super().__init__(task, checkout, limits)
        self.lower = checkout
        self.slot = -1
        self.scratch: Path | None = None
        self._holder: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Future[None] | None = None
        self._init = 0
        self._shell = 0

    @staticmethod
    async def probe(work: Path) -> None:
        """Raise SandboxError unless the whole form used here starts on this machine."""
        work.mkdir(parents=True, exist_ok=True)
        task: Any = SimpleNamespace(workdir="/testbed", task_id="probe")
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=work) as folder:
            lower = Path(folder, "lower")
            lower.mkdir()
            sandbox = BwrapSandbox(task, lower, Limits())
            try:
                await sandbox.start()
                done = await sandbox.run(["true"])
            finally:
                await sandbox.stop()
        if done.exit_code:
            raise SandboxError(" ".join(done.stdout.decode(errors="replace").split()))

    async def start(self) -> None:
        # A cancelled start would leave half a sandbox: `stop` waits for a whole one.
        self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self.slot = next((slot for slot in range(SLOTS) if slot not in _live_slots), -1)
        if self.slot < 0:
            raise SandboxError(f"{SLOTS} sandboxes are live already; lower eval.concurrency")
        _live_slots.add(self.slot)
        # Beside the checkout, so on its filesystem: inode numbers stay, and git trusts its index.
        self.scratch = _scratch(self.lower.parent, self.slot)
        options = options_for(self.lower, self.scratch, self.task.workdir, self.limits)
        args = os.memfd_create("bwrap")  # the command line of pid 1 is for all in it to see
        os.write(args, os.fsencode("\0".join(options)))
        os.lseek(args, 0, os.SEEK_SET)
        self._holder = await asyncio.create_subprocess_exec(
            *(bwrap_path(), "--args", str(args), "--", "sh", "-c", IDLE, IDLE),
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(args,),
            start_new_session=True,  # a terminal's Ctrl-C is for the harness alone
        )
        os.close(args)
        self._init = await self._first_child(self._holder.pid)
        await self._first_child(self._init)  # only now everything is mounted

    async def _first_child(self, pid: int) -> int:
        assert self._holder is not None and self._holder.stderr is not None
        deadline = asyncio.get_running_loop().time() + START_SEC
        while not (found := _children(pid)):
            if self._holder.returncode is not None:
                text = " ".join((await self._holder.stderr.read()).decode(errors="replace").split())
                raise SandboxError(f"{text}; allow user namespaces, or run as root")
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxError("bwrap does not start")
            await asyncio.sleep(0.001)
        return found[0]

    async def stop(self) -> None:
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        _live_slots.discard(self.slot)
        holder, self._holder = self._holder, None
        if holder is not None:
            _kill(_children(holder.pid) or [holder.pid])  # with its pid 1 the kernel kills the rest
            await holder.wait()
        if self.scratch is not None:
            scratch, self.scratch = self.scratch, None
            await asyncio.to_thread(_remove, scratch)

    async def _run(self, command: Command) -> ExecResult:
        capture = Capture(command.output_bytes)
        entering = asyncio.ensure_future(self._enter(command))
        try:
            process = await asyncio.shield(entering)
        except asyncio.CancelledError:
            await self._end(await entering, asyncio.ensure_future(asyncio.sleep(0)))
            raise
        done = asyncio.ensure_future(pump(process, command.stdin, capture))
        ended = asyncio.ensure_future(_exited(process))
        watcher = asyncio.ensure_future(self._watch(process.pid, command.timeout_sec))
        try:
            await asyncio.wait((ended, watcher), return_when=asyncio.FIRST_COMPLETED)
            cut = 0 if ended.done() else watcher.result()
        finally:
            watcher.cancel()
            ended.cancel()
            await asyncio.shield(self._end(process, done))
        if self._holder is None or self._holder.returncode is not None:
            raise SandboxError("the sandbox died under a command")
        if cut == OOM_EXIT:
            capture.feed(f"\n[killed: more than {self.limits.memory_mb} MiB of memory]\n".encode())
        code = process.returncode or 0
        exit_code = cut or (code if code >= 0 else 128 - code)
        return ExecResult(exit_code, capture.value(), cut == TIMED_OUT, capture.dropped > 0)

    async def _enter(self, command: Command, tty: int | None = None) -> asyncio.subprocess.Process:
        """Start a command in the sandbox's namespaces."""
        if self._holder is None:
            raise SandboxError("the sandbox is not started")
        stdin = asyncio.subprocess.PIPE if command.stdin else asyncio.subprocess.DEVNULL
        chdir = ["env", f"--chdir={command.cwd or self.task.workdir}"]
        with entrance(self._init) as (enter, fds):
            return await asyncio.create_subprocess_exec(
                *(*enter, *wrapper(self.slot, self.limits), *chdir, *command.argv),
                env={**environment(), **command.env},
                stdin=tty or stdin,
                stdout=tty or asyncio.subprocess.PIPE,
                stderr=tty or asyncio.subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,
            )

    async def _end(self, process: asyncio.subprocess.Process, done: asyncio.Future[None]) -> None:
        """End a command and what it left; beside a shell only what is still below the command."""
        if self._shell:
            _kill(_tree(process.pid)[1:])
            await asyncio.wait((done,), timeout=GRACE_SEC)  # what it left may hold its output
            done.cancel()
        else:
            if process.returncode is None or len(_children(self._init)) > 1:
                await self._kill_all()
            await done
        if process.returncode is None:
            await process.wait()

    async def _kill_all(self) -> None:
        """In the sandbox, `kill -1` reaches everything but its pid 1."""
        with entrance(self._init) as (enter, fds):
            kill = await asyncio.create_subprocess_exec(
                *enter, "sh", "-c", "kill -9 -1", pass_fds=fds, stderr=asyncio.subprocess.DEVNULL
            )
            await kill.wait()

    async def _watch(self, pid: int, timeout_sec: float) -> int:
        deadline = asyncio.get_running_loop().time() + timeout_sec
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(WATCH_SEC, left))
            processes = {*_tree(pid), *_tree(self._init), *(_tree(self._shell)[1:])}
            if _rss_bytes(processes) > self.limits.memory_mb * MIB:
                return OOM_EXIT
        return TIMED_OUT

    @asynccontextmanager
    async def shell(self, env: Mapping[str, str] = NO_ENV) -> AsyncIterator[int]:
        terminal, tty = os.openpty()
        command = Command(["setsid", "--ctty", *SHELL], b"", {**SHELL_ENV, **env}, None, 0, 0)
        try:
            process = await self._enter(command, tty)
            os.close(tty)
            os.write(terminal, b"\n")
            self._shell = process.pid
            watcher = asyncio.ensure_future(self._watch_shell())
            try:
                yield terminal
            finally:
                watcher.cancel()
                self._shell = 0
                await asyncio.shield(self._kill_all())
                await process.wait()
        finally:
            os.close(terminal)

    async def _watch_shell(self) -> None:
        """Too much memory ends all but the terminal's bash, and that loop which starts it."""
        while await self._watch(self._shell, float("inf")):
            _kill([*_tree(self._shell)[3:], *_tree(self._init)[2:]])


async def _exited(process: asyncio.subprocess.Process) -> None:
    """asyncio's own wait() waits for the end of the output too."""
    while process.returncode is None:
        await asyncio.sleep(0.002)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _tree(pid: int) -> list[int]:
    """The process and all below it, parents first; none for 0."""
    found = [pid] if pid else []
    for process in found:
        found += _children(process)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def _rss_bytes(pids: set[int]) -> int:
    pages = 0
    for pid in pids:
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


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
