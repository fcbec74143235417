"""Process trees, by /proc: who is below a process, how much memory they use, and their end.

In: a pid, or a process that asyncio started. Out: pids, bytes. Refuses nothing: a process that is
gone by now is no error.
"""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path


async def exited(process: asyncio.subprocess.Process) -> None:
    """asyncio's own wait() waits for the end of the output too."""
    while process.returncode is None:
        await asyncio.sleep(0.005)


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill the tree: with the sandbox's pid 1 the kernel kills all in it before bwrap returns."""
    with suppress(ProcessLookupError):
        # Stopped first, so that a bwrap that is just starting can't fork a child we don't see.
        process.send_signal(signal.SIGSTOP)
        for pid in tree(process.pid)[1:] or [process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.send_signal(signal.SIGCONT)


def tree(pid: int) -> list[int]:
    """The process and all below it, parents first."""
    found = [pid]
    for process in found:
        found += children(process)
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def tree_rss_bytes(pid: int) -> int:
    total = 0
    for process in tree(pid):
        with suppress(OSError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")
