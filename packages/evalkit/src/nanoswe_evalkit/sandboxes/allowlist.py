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
from nanoswe_evalkit.sandboxes.base import Command, ExecResult, Limits, Sandbox, SandboxError
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

    async def _run(self, command: Command) -> ExecResult:
        if self.scratch is None:
            raise SandboxError("the sandbox is not started")
        try:
            argv = self._allowed(list(command.argv))
        except ValueError as error:
            return ExecResult(126, f"not allowed here: {error}\n".encode())
        env = {**ENV, **command.env, "HOME": str(self.scratch)}
        if "TESTS" in env:
            env["TESTS"] = str(self.scratch / "tests")
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=self.scratch / "tree", env=env, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        capture = base.Capture(command.output_bytes)
        pump = asyncio.ensure_future(base.pump(process, command.stdin, capture))
        try:
            timed_out = not (await asyncio.wait((pump,), timeout=command.timeout_sec))[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await pump
        code = process.returncode or 0
        exit_code = base.TIMED_OUT if timed_out else (code if code >= 0 else 128 - code)
        return ExecResult(exit_code, capture.value(), timed_out, capture.dropped > 0)

    def _allowed(self, argv: list[str]) -> list[str]:
        """The command to run instead; ValueError says why not."""
        if argv[:1] in (["/bin/sh"], ["/bin/bash"]) and argv[2:3] in ([EXTRACT], [EVALUATE]):
            return argv
        if argv == ["git", "apply", "-"]:
            return argv
        if argv[:2] == ["bash", "-c"] and len(argv) == 3:
            lexer = shlex.shlex(argv[2], posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            argv = list(lexer)
            if any(word and set(word) <= set("();<>|&") for word in argv):
                raise ValueError("one plain command at a time, without a shell")
        program, *rest = argv or [""]
        if program not in PROGRAMS:
            raise ValueError(f"{program!r}; only {', '.join(PROGRAMS)}")
        return self._confined(program, rest)

    def _confined(self, program: str, rest: list[str]) -> list[str]:
        options, plain = list[str](), list[str]()
        for word in rest:
            is_option = re.fullmatch(PROGRAMS[program], word) and (word[0] == "-" or not plain)
            (options if is_option else plain).append(word)
        pattern = [plain.pop(0)] if program in PATTERN_FIRST and plain else []
        if pattern and pattern[0].startswith("-"):
            raise ValueError(f"{program} {pattern[0]}")
        paths = [self._inside(word) for word in plain]
        if not paths and program != "ls":
            raise ValueError(f"{program} without a file")
        # GNU sed's own sandbox mode refuses its commands that run programs or touch other files.
        safe = ["--sandbox"] if program == "sed" else []
        return [program, *safe, *options, "--", *pattern, *paths]

    def _inside(self, word: str) -> str:
        assert self.scratch is not None
        tree = (self.scratch / "tree").resolve()
        path = (tree / word.removeprefix(f"{self.task.workdir}/")).resolve()
        if word.startswith("-") or not path.is_relative_to(tree):
            raise ValueError(f"{word!r} is outside the repository")
        if path.is_relative_to(tree / ".git"):
            raise ValueError(f"{word!r} is git's own")
        return str(path.relative_to(tree))
