"""`openhands` and `mini`: an agent of its own Python, in one runner process for all trials.

In: the Python that has the agent's package (`./just setup agents`), and the agent's settings. Out:
how it stopped. The runner asks over a unix socket, a connection a trial: its tools' commands run in
the trial's sandbox, and a terminal there is handed over as a descriptor. Refuses (EvalkitError) a
Python without the package; a runner that dies is our fault.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoswe_evalkit.agents.base import Job, ModelError
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import MIB

RUNNERS = Path(__file__).parent / "runners"
OUTPUT_BYTES = 11 * MIB  # more than the 10 MiB that OpenHands' file editor takes
LINE_BYTES = 64 * MIB
QUIET = {"OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
QUIET |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
QUIET |= {"ALLOW_SHORT_CONTEXT_WINDOWS": "true"}


class RunnerAgent:
    """`settings` is sent with every job, and is in the record of every trial."""

    def __init__(self, kind: str, python: Path, settings: dict[str, Any]) -> None:
        self.kind, self.python, self.settings = kind, python, settings
        self._folder = Path()
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self, job: Job) -> Stop:
        async with self._starting:
            await self.start()
        job.facts.update(self.settings)
        async with AsyncExitStack() as stack:
            terminals = await stack.enter_async_context(AsyncExitStack())
            sock = await self._connect()
            reader, writer = await asyncio.open_connection(sock=sock, limit=LINE_BYTES)
            stack.callback(writer.close)
            first = {"base_url": job.base_url, "model": asdict(job.model), **self.settings}
            task = {"instruction": job.task.instruction, "workdir": job.task.workdir}
            _send(writer, {**first, **task})
            while line := await reader.readline():
                request = json.loads(line)
                match request.pop("op"):
                    case "run":
                        _send(writer, await _run(job, request))
                    case "terminal":
                        await terminals.aclose()
                        shell = job.sandbox.shell(request["env"])
                        terminal = await terminals.enter_async_context(shell)
                        socket.send_fds(sock, [b"\0"], [terminal])
                    case "message":
                        _record(job, **request)
                        _send(writer, None)
                    case "end":
                        return _end(job, **request)
        raise EvalkitError(f"the {self.kind} runner died: {self._log()}")

    async def start(self) -> None:
        """Start the runner, unless it runs; importing an agent takes it many seconds."""
        if self._process is not None and self._process.returncode is None:
            return
        await self.close()
        if not self.python.is_file():
            raise EvalkitError(
                f"{self.python}: agent {self.kind} needs a Python of its own; "
                "./just setup agents, or set agent.python"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="nanoswe-"))
        # No file of this user's home or settings may change what an agent does.
        home = {"HOME": str(self._folder), "TMPDIR": str(self._folder)}
        with (self._folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                self.python,
                RUNNERS / f"with_{self.kind}.py",
                self._folder / "socket",
                stdin=asyncio.subprocess.PIPE,  # its end tells the runner that we are gone
                stdout=log,
                stderr=log,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", **QUIET, **home},
                start_new_session=True,
            )
        while not (self._folder / "socket").exists():
            await asyncio.sleep(0.05)
            if self._process.returncode is not None:
                raise EvalkitError(f"no {self.kind} runner: {self._log()}")

    async def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(self._folder / "socket"))
        except OSError as error:
            sock.close()
            raise EvalkitError(f"no {self.kind} runner: {self._log()}") from error
        return sock

    def _log(self) -> str:
        with suppress(OSError):
            text = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
            return " ".join(text[-1000:].split()) or "it says nothing"
        return "it left no log"


def _send(writer: asyncio.StreamWriter, value: Any) -> None:
    writer.write(json.dumps(value).encode() + b"\n")


async def _run(job: Job, request: dict[str, Any]) -> tuple[int, str, bool]:
    done = await job.sandbox.run(
        request["argv"],
        stdin=request["stdin"].encode("latin-1"),  # bytes travel as text of one byte a character
        cwd=request["cwd"],
        timeout_sec=request["timeout_sec"] or None,
        output_bytes=OUTPUT_BYTES,
    )
    return done.exit_code, done.stdout.decode("latin-1"), done.timed_out


def _record(job: Job, message: dict[str, Any], again: bool = False) -> None:
    """Add a message; `again`: its calls belong to the last one, which came from the same turn."""
    if again and job.messages:
        job.messages[-1].setdefault("tool_calls", []).extend(message.get("tool_calls", []))
    else:
        job.messages.append(message)


def _end(job: Job, facts: dict[str, Any] | None = None, stop: str = "", error: str = "") -> Stop:
    job.facts.update(facts or {})
    if error:
        raise ModelError(f"model at {job.base_url}: {error}")
    return Stop(stop)
