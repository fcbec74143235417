"""Which sandboxes there are, how one is picked, and a factory that shares checkouts.

In: a kind (`auto` or one of SANDBOXES), a mirror of repositories and a work folder.
Out: started sandboxes, stopped again whatever happens. A task's checkout is made once and is only
read. Refuses an unknown kind, and `auto` where nothing safe can start (the error names the remedy);
`allowlist` is never picked by itself.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from nanoswe_evalkit.sandboxes.base import Limits, Sandbox, SandboxError
from nanoswe_harbor.checkout import checkout, git
from nanoswe_harbor.task import Task

SANDBOXES = {kind: f"{kind.title()}Sandbox" for kind in ("bwrap", "docker", "daytona", "allowlist")}


def load(kind: str) -> Any:
    """The class behind a kind."""
    if kind not in SANDBOXES:
        raise SandboxError(f"unknown sandbox {kind!r}; choose auto or {', '.join(SANDBOXES)}")
    try:
        return getattr(import_module(f"nanoswe_evalkit.sandboxes.{kind}"), SANDBOXES[kind])
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed; pip install 'nanoswe-evalkit[{kind}]'"
        raise SandboxError(text) from error


async def pick(kind: str, work: Path) -> str:
    """Resolve `auto`; for any kind, raise SandboxError when it can't start on this machine."""
    if kind != "auto":
        await load(kind).probe(work)
        return kind
    reasons = []
    for candidate in ("bwrap", "docker"):
        try:
            return await pick(candidate, work)
        except SandboxError as error:
            reasons.append(f"{candidate}: {error}")
    raise SandboxError("no sandbox can start here. " + "; ".join(reasons))


class SandboxFactory:
    """Opens sandboxes of one kind; `work` holds checkouts and live sandboxes, and may go after."""

    def __init__(self, kind: str, work: Path, mirror: Path | None, limits: Limits) -> None:
        self.kind, self.mirror, self.limits = kind, mirror, limits
        self.work = work.resolve()
        self._class = load(kind)
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """A started sandbox on the task's pristine checkout."""
        sandbox: Sandbox = self._class(task, await self._checkout(task), self.limits)
        try:
            await sandbox.start()
            yield sandbox
        finally:
            await asyncio.shield(sandbox.stop())

    @asynccontextmanager
    async def ahead(self, task: Task) -> AsyncIterator[Callable[[], Any]]:
        """How to open pristine sandboxes; where that takes long, the first one starts right now."""
        async with AsyncExitStack() as stack:
            slow = self.kind == "docker" and task.base_commit
            first = stack.enter_async_context(self.open(task)) if slow else None
            spares = [asyncio.create_task(first)] if first else []

            @asynccontextmanager
            async def pristine() -> AsyncIterator[Sandbox]:
                async with AsyncExitStack() as other:
                    fresh = other.enter_async_context(self.open(task)) if not spares else None
                    yield await (fresh or spares.pop())

            try:
                yield pristine
            finally:
                await asyncio.gather(*spares, return_exceptions=True)

    async def _checkout(self, task: Task) -> Path | None:
        if self.mirror is None or not task.base_commit:
            return None
        dest = self.work / "checkouts" / task.task_id
        lock = self._locks.setdefault(task.task_id, asyncio.Lock())
        async with lock:
            if not dest.exists():
                await asyncio.to_thread(self._make_checkout, task, dest)
        return dest

    def _make_checkout(self, task: Task, dest: Path) -> None:
        assert self.mirror is not None
        # Made aside and renamed, so that a killed run leaves no half checkout behind.
        fresh = dest.with_name(f"{dest.name}.{os.getpid()}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        # Open to every sandbox's own uid; the work folder keeps other users of the machine out.
        self.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.work.chmod(0o700)
        checkout(task.repo, task.base_commit, self.mirror, fresh)
        subprocess.run(["chmod", "-R", "a+rwX", str(fresh)], check=True)
        # A changed mode makes the index stale, and every later git would read all files again.
        git(fresh, "update-index", "-q", "--refresh")
        (fresh / ".git" / "index").chmod(0o666)
        fresh.rename(dest)
