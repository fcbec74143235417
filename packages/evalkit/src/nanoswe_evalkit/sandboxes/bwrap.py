"""`bwrap`: rootless, no daemon; one bubblewrap a sandbox, which commands join.

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
import subprocess
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nanoswe_evalkit.sandboxes import base
from nanoswe_evalkit.sandboxes import bwrap_view as view
from nanoswe_evalkit.sandboxes.base import Command, Limits, Sandbox, SandboxError
from nanoswe_harbor.task import Task

WATCH_SEC = 0.2

_live_slots: set[int] = set()


class BwrapSandbox(Sandbox):
    """One task's repository, in the namespaces of a process that only waits."""

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        if checkout is None:
            raise SandboxError(f"{task.task_id}: bwrap needs a checkout; set tasks.mirror")
        super().__init__(task, checkout, limits)
        self.lower = checkout
        self.image = view.unpacked(limits.images, task.docker_image)
        self.fixture = view.unpacked(limits.images, base.FIXTURES.get(task.repo))
        self._player: Process | None = None
        self.slot = -1
        self.scratch: Path | None = None
        self._holder: Process | None = None
        self._watcher: asyncio.Future[None] | None = None
        self._init = 0
        self._inside: dict[int, int] = {}  # pid of a joined process → how many of its tree to spare
        self._over_memory = False

    @staticmethod
    async def probe(work: Path) -> None:
        """Raise SandboxError unless the whole form used here starts on this machine."""
        work.mkdir(parents=True, exist_ok=True)
        task: Any = SimpleNamespace(workdir="/testbed", task_id="probe", docker_image="", repo="")
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=work) as folder:
            sandbox = BwrapSandbox(task, Path(folder), Limits())
            try:
                await sandbox.start()
                done = await sandbox.run(["true"])
            finally:
                await sandbox.stop()
        if done.exit_code:
            raise SandboxError(" ".join(done.stdout.decode(errors="replace").split()))

    async def _start(self) -> None:
        self.slot = next((slot for slot in range(view.SLOTS) if slot not in _live_slots), -1)
        if self.slot < 0:
            raise SandboxError(f"{view.SLOTS} sandboxes are live already; lower eval.concurrency")
        _live_slots.add(self.slot)
        # Beside the checkout, so on its filesystem: inode numbers stay, and git trusts its index.
        self.scratch = _scratch(self.lower.parent, self.slot)
        places = (self.lower, self.scratch, self.task.workdir)
        options = view.options_for(*places, self.limits, self.image, self.fixture)
        args = os.memfd_create("bwrap")  # the command line of pid 1 is for all in it to see
        os.pwrite(args, os.fsencode("\0".join(options)), 0)
        self._holder = await asyncio.create_subprocess_exec(
            *(view.bwrap_path(), "--args", str(args), "--", "sh", "-c", base.IDLE, base.IDLE),
            env=view.environment(self.image), stdin=DEVNULL, pass_fds=(args,),
            stdout=DEVNULL, stderr=PIPE,
            start_new_session=True  # a terminal's Ctrl-C is for the harness alone
        )  # fmt: skip
        os.close(args)
        self._init = await self._first_child(self._holder.pid)
        await self._first_child(self._init)  # only now everything is mounted
        if self.fixture is not None:
            beside = ["sh", str(view.FIXTURE), view.bwrap_path(), str(self.fixture)]
            self._player = await self._enter(Command((), b"", {}, "/", 0), beside=beside)
            assert self._player.stdout is not None
            if (said := await self._player.stdout.readline()) != b"ready\n":
                raise SandboxError(f"{self.fixture}: {said.decode()}; see docker/fixture")
        self._watcher = asyncio.ensure_future(self._watch_memory())

    async def _first_child(self, pid: int) -> int:
        assert self._holder is not None and self._holder.stderr is not None
        while not (found := _children(pid)):
            if self._holder.returncode is not None:
                text = " ".join((await self._holder.stderr.read()).decode(errors="replace").split())
                raise SandboxError(f"{text}; allow user namespaces, or run as root")
            await asyncio.sleep(0.001)
        return found[0]

    async def _stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        processes, self._holder = (self._player, self._holder), None
        for process in filter(None, processes):
            _kill(_children(process.pid) or [process.pid])  # with a pid 1 the kernel kills the rest
            await process.wait()
        _live_slots.discard(self.slot)  # its uid is nobody's now
        if self.scratch is not None:
            await asyncio.to_thread(_remove, self.scratch)
        self.scratch = None

    async def _begin(self, command: Command, capture: base.Capture) -> base.Running:
        process = await self._enter(command)
        self._inside[process.pid] = 1
        return base.follow(process, command.stdin, capture)

    async def _enter(self, command: Command, tty: int = 0, beside: Sequence[str] = ()) -> Process:
        """Start a command in the sandbox's namespaces, or what runs `beside` it in its network."""
        inside = [*view.wrapper(self.slot, self.limits), "env", f"--chdir={command.cwd}"]
        with view.entrance(self._init, bool(beside)) as (enter, fds):
            return await asyncio.create_subprocess_exec(
                *(*enter, *(beside or inside), *command.argv),
                env={**view.environment(self.image), **command.env}, pass_fds=fds,
                stdin=tty or (PIPE if command.stdin else DEVNULL), stdout=tty or PIPE,
                stderr=tty or STDOUT, start_new_session=True
            )  # fmt: skip

    async def _finish(self, running: base.Running) -> None:
        """Beside a shell, only what is still below the command is killed."""
        pid, cut_short = running.handle.pid, not running.ended.done()
        self._inside.pop(pid, None)
        if cut_short:
            # It may be about to fork into the sandbox: stopped, its tree is known whole.
            _kill([pid], signal.SIGSTOP)
            _kill(_tree(pid))
        if not self._inside and (cut_short or len(_children(self._init)) > 1):
            await self._kill_all()
        await running.output
        if await running.ended == 137 and not cut_short and self._holder is not None:
            with suppress(TimeoutError):  # it may be dying: what is in it goes first
                await asyncio.wait_for(self._holder.wait(), 0.2)
        if self._holder is None or self._holder.returncode is not None:
            raise SandboxError("the sandbox died under a command")
        if self._over_memory:
            text = b"\n[killed: more than %d MiB of memory]\n"
            running.capture.feed(text % self.limits.memory_mb)
            self._over_memory = False

    async def _kill_all(self) -> None:
        """In the sandbox, `kill -1` reaches everything but its pid 1."""
        with view.entrance(self._init) as (enter, fds):
            argv = [*enter, "sh", "-c", "exec 2>/dev/null; kill -9 -1"]
            await (await asyncio.create_subprocess_exec(*argv, pass_fds=fds)).wait()

    async def _watch_memory(self) -> None:
        """Too much in all ends everything but a terminal's bash, and the loop which starts that."""
        while True:
            await asyncio.sleep(WATCH_SEC)
            if not self._inside:
                continue  # nothing runs but what waits
            pids = [pid for top, spare in self._inside.items() for pid in _tree(top)[spare:]]
            pids += _tree(self._init)[2:]
            if _rss_bytes(pids) > self.limits.memory_mb * base.MIB:
                self._over_memory = True
                _kill(pids)

    @asynccontextmanager
    async def _terminal(self, command: Command) -> AsyncIterator[int]:
        terminal, tty = os.openpty()
        with os.fdopen(terminal, "r+b", 0):
            argv = ["setsid", "--ctty", *command.argv]
            process = await self._enter(replace(command, argv=argv), tty)
            os.close(tty)
            self._inside[process.pid] = 3
            try:
                yield terminal
            finally:
                del self._inside[process.pid]
                await asyncio.shield(self._kill_all())
                await process.wait()


def _kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _tree(pid: int) -> list[int]:
    """The process and all below it, parents first."""
    found = [pid]
    for process in found:
        found += _children(process)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in threads:  # not a Path for each: the memory watch asks often
            with Path(thread.path, "children").open("rb") as file:
                found += map(int, file.read().split())
    return found


def _rss_bytes(pids: list[int]) -> int:
    pages = 0
    for pid in pids:
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _scratch(parent: Path, slot: int) -> Path:
    scratch = Path(tempfile.mkdtemp(prefix=".live-", dir=parent))
    for name in ("upper", "work", "env-upper", "env-work"):
        (scratch / name).mkdir()
        if view.IS_ROOT:
            os.chown(scratch / name, view.uid_of(slot), view.uid_of(slot))
    return scratch


def _remove(scratch: Path) -> None:
    """The kernel and the agent may leave folders that their owner can't enter."""
    if not view.IS_ROOT:
        subprocess.run(["chmod", "-R", "u+rwx", str(scratch)], check=False)
    shutil.rmtree(scratch)
