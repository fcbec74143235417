"""`allowlist`: the demo's last resort where nothing can be isolated. IT IS NOT A SANDBOX.

In: a task and its checkout. Out: the results of a few named programs, run one at a time and
without a shell on a temporary copy, with paths confined to it; and of our own two grading scripts,
which run the task's tests, and with them what the model wrote, AS THIS USER, WITH NETWORK. It is
never picked by `auto`. Refuses everything else (126).
"""

import asyncio
import logging
import os
import re
import shlex
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from nanoswe_evalkit.grading import EVALUATE, EXTRACT
from nanoswe_evalkit.sandboxes import base
from nanoswe_evalkit.sandboxes.base import Command, Limits, Sandbox, SandboxError
from nanoswe_harbor.task import Task

log = logging.getLogger(__name__)
# Program → what its options may look like. Everything else is a path below the copy, but for the
# first plain argument of grep (a pattern) and of sed (a script).
PROGRAMS = {
    "cat": r"-[nA]+", "ls": r"-[laRA1]+", "head": r"-\d+|-n\d*|-c\d*|\d+",
    "grep": r"-[nrilEFHvwc]+", "sed": r"-[nE]+|-i"
}  # fmt: skip
PATTERN_FIRST = ("grep", "sed")
ENV = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


class AllowlistSandbox(Sandbox):
    """A temporary copy of the checkout."""

    def __init__(self, task: Task, checkout: Path | None, limits: Limits) -> None:
        if checkout is None:
            raise SandboxError(f"{task.task_id}: allowlist needs a checkout; set tasks.mirror")
        super().__init__(task, checkout, limits)
        self.source = checkout
        self.scratch: Path | None = None

    @staticmethod
    async def probe(work: Path) -> None:
        """It starts everywhere, and says each time what it is."""
        log.warning("NO SANDBOX: tests run model-written code as this user, with network")

    async def _start(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="nanoswe-allowlist-"))
        tree = self.scratch / "tree"
        await asyncio.to_thread(shutil.copytree, self.source, tree, symlinks=True)

    async def _stop(self) -> None:
        if self.scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self.scratch)
        self.scratch = None

    async def _begin(self, command: Command, capture: base.Capture) -> base.Running:
        try:
            argv = self._allowed(list(command.argv))
        except ValueError as error:
            argv = ["sh", "-c", 'echo "$0"; exit 126', f"not allowed here: {error}"]
        assert self.scratch is not None
        env = {**ENV, **command.env, "HOME": str(self.scratch)}
        if "TESTS" in env:
            env["TESTS"] = str(self.scratch / "tests")
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=self.scratch / "tree", env=env, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        return base.follow(process, command.stdin, capture)

    async def _finish(self, running: base.Running) -> None:
        with suppress(ProcessLookupError):
            os.killpg(running.handle.pid, signal.SIGKILL)
        await running.output

    def _allowed(self, argv: list[str]) -> list[str]:
        """The command to run instead; ValueError says why not."""
        ours = argv[:1] in (["/bin/sh"], ["/bin/bash"]) and argv[2:3] in ([EXTRACT], [EVALUATE])
        if ours or argv == ["git", "apply", "-"]:
            return argv
        if argv[:2] == ["bash", "-c"] and len(argv) == 3:
            lexer = shlex.shlex(argv[2], posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            argv = list(lexer)
            if any(word and set(word) <= set("();<>|&") for word in argv):
                raise ValueError("one plain command at a time, without a shell")
        program, *words = argv or [""]
        if program not in PROGRAMS:
            raise ValueError(f"{program!r}; only {', '.join(PROGRAMS)}")
        options = [word for word in words if re.fullmatch(PROGRAMS[program], word)]
        plain = [word for word in words if word not in options]
        if wrong := [word for word in plain if word.startswith("-")]:
            raise ValueError(f"{program} {wrong[0]}")
        patterns = 1 if program in PATTERN_FIRST else 0
        paths = [self._inside(word) for word in plain[patterns:]]
        if not paths and program != "ls":
            raise ValueError(f"{program} without a file")
        # GNU sed's own sandbox mode refuses its commands that run programs or touch other files.
        safe = ["--sandbox"] if program == "sed" else []
        return [program, *safe, *options, "--", *plain[:patterns], *paths]

    def _inside(self, word: str) -> str:
        assert self.scratch is not None
        tree = (self.scratch / "tree").resolve()
        path = (tree / word.removeprefix(f"{self.task.workdir}/")).resolve()
        if not path.is_relative_to(tree):
            raise ValueError(f"{word!r} is outside the repository")
        if path.is_relative_to(tree / ".git"):
            raise ValueError(f"{word!r} is git's own")
        return str(path.relative_to(tree))
