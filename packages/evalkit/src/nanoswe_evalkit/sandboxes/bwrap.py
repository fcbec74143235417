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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoswe_evalkit.sandboxes.base import (
    GET,
    MIB,
    NO_ENV,
    PUT,
    TIMED_OUT,
    Capture,
    ExecResult,
    Limits,
    SandboxError,
    check_tar,
    pump,
)
from nanoswe_evalkit.sandboxes.bwrap_view import (
    IS_ROOT,
    SLOTS,
    bwrap_path,
    make_etc,
    options_for,
    uid_of,
    wrapper,
)
from nanoswe_harbor.task import Task

WATCH_SEC = 0.2
OOM_EXIT = 137

_live_slots: set[int] = set()


class BwrapSandbox:
    """One task's repository; state lives in the upper layer of an overlay until `stop`."""

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        if checkout is None:
            raise SandboxError(f"{task.task_id}: bwrap needs a checkout; set tasks.mirror")
        self.checkout, self.limits, self.workdir = checkout, limits, task.workdir
        self.slot = -1
        self.scratch: Path | None = None

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
        self.scratch = _scratch(self.checkout.parent, self.slot)

    async def stop(self) -> None:
        _live_slots.discard(self.slot)
        if self.scratch is not None:
            scratch, self.scratch = self.scratch, None
            await asyncio.to_thread(_remove, scratch)

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
        if self.scratch is None:
            raise SandboxError("the sandbox is not started")
        options = options_for(self.checkout, self.scratch, self.workdir, self.limits)
        options += ["--chdir", cwd or self.workdir]
        for name, value in env.items():
            options += ["--setenv", name, value]
        capture = Capture(output_bytes or self.limits.output_bytes)
        with _memory_file("") as status, _memory_file("\0".join(options)) as args:
            command = [bwrap_path(), "--args", str(args), "--json-status-fd", str(status), "--"]
            spawning = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *command,
                    *wrapper(self.slot, self.limits),
                    *argv,
                    stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(args, status),
                    start_new_session=True,  # a terminal's Ctrl-C is for the harness alone
                )
            )
            try:
                process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                # asyncio would kill bwrap alone, whose half-made child then waits for it forever.
                _kill(process := await spawning)
                await pump(process, b"", capture)
                raise
            seconds = timeout_sec or self.limits.timeout_sec
            memory_bytes = self.limits.memory_mb * MIB
            cut = await _finish(process, stdin, capture, seconds, memory_bytes)
            exit_code = cut or _status(status).get("exit-code")
        if exit_code is None:
            raise SandboxError(f"bwrap failed: {capture.value().decode(errors='replace').strip()}")
        return ExecResult(exit_code, capture.value(), cut == TIMED_OUT, capture.dropped > 0)

    async def put(self, tar: bytes, dest: str) -> None:
        check_tar(tar)
        if not f"{dest}/".startswith(f"{self.workdir}/"):
            raise SandboxError(f"{dest}: only {self.workdir} keeps files between commands")
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


async def _finish(
    process: asyncio.subprocess.Process,
    stdin: bytes,
    capture: Capture,
    timeout_sec: float,
    memory_bytes: int,
) -> int | None:
    """See the process to its end, or end its whole tree; the exit code, if we forced one."""

    async def watch() -> int:
        deadline = asyncio.get_running_loop().time() + timeout_sec
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(WATCH_SEC, left))
            if _tree_rss_bytes(process.pid) > memory_bytes:
                capture.feed(f"\n[killed: more than {memory_bytes} bytes of memory]\n".encode())
                return OOM_EXIT
        return TIMED_OUT

    done = asyncio.ensure_future(pump(process, stdin, capture))
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((done, watcher), return_when=asyncio.FIRST_COMPLETED)
        return None if done.done() else watcher.result()
    finally:
        watcher.cancel()
        if process.returncode is None:
            _kill(process)
        await done


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the sandbox's pid 1: the kernel then kills everything in it before bwrap returns."""
    with suppress(ProcessLookupError):
        # Stopped first, so that a bwrap that is just starting can't fork a child we don't see.
        process.send_signal(signal.SIGSTOP)
        children = _children(process.pid)
        for pid in children or [process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.send_signal(signal.SIGCONT)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def _status(fd: int) -> dict[str, int]:
    merged: dict[str, int] = {}
    for line in os.pread(fd, 4096, 0).splitlines():
        with suppress(ValueError):  # the last line may still be half-written
            merged.update(json.loads(line))
    return merged


def _tree_rss_bytes(pid: int) -> int:
    total, page, todo = 0, os.sysconf("SC_PAGE_SIZE"), [pid]
    while todo:
        process = todo.pop()
        with suppress(OSError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * page
        todo += _children(process)
    return total


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
