"""`openhands` and `mini`: agents in a Python of their own, one runner process for all trials.

In: which, its Python (`./just setup openhands`, or `mini`, makes it), the agent's settings. Out:
how it stopped. The runner asks over a unix socket: its tools' commands run in the trial's sandbox,
and a terminal there is handed over as a descriptor. Refuses (EvalkitError) a Python without it.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoswe_evalkit.agents.base import TOO_LONG, Job, ModelError
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import MIB

RUNNERS = Path(__file__).parent / "runners"
MOST = 11 * MIB  # more than the 10 MiB that OpenHands' file editor takes
QUIET = "OPENHANDS_SUPPRESS_BANNER ALLOW_SHORT_CONTEXT_WINDOWS MSWEA_SILENT_STARTUP"
ENV = dict.fromkeys([*QUIET.split(), "LITELLM_LOCAL_MODEL_COST_MAP"], "true")
ENV |= {"LANG": "C.UTF-8", "PATH": os.defpath, "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "5"}


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
            await self._process.communicate()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def run(self, job: Job) -> Stop:
        async with self._starting:
            await self.start()
        job.facts.update(self.settings)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._folder / "socket"))
        reader, writer = await asyncio.open_connection(sock=sock, limit=64 * MIB)
        first = {"base_url": job.base_url, "model": asdict(job.model), **self.settings}
        answer: Any = {**first, "instruction": job.task.instruction, "workdir": job.task.workdir}
        with closing(writer), ExitStack() as call:
            async with AsyncExitStack() as terminals:
                while True:
                    writer.write(json.dumps(answer).encode() + b"\n")
                    if not (line := await reader.readline()):
                        raise EvalkitError(f"the runner of {self.kind} died: {self._log()}")
                    request, answer = json.loads(line), None
                    call.close()  # whatever it wants, a model call has ended
                    job.facts.update(request.get("facts", {}))
                    match request.pop("op"):
                        case "run":  # bytes travel as latin-1 text
                            data = request["stdin"].encode("latin-1")
                            run = job.sandbox.run(request["argv"], stdin=data, output_bytes=MOST)
                            answer = ((done := await run).exit_code, done.stdout.decode("latin-1"))
                        case "terminal":
                            await terminals.aclose()
                            shell = job.sandbox.shell(request)
                            terminal = await terminals.enter_async_context(shell)
                            socket.send_fds(sock, [b"\0"], [terminal])
                        case "asking":
                            call.enter_context(job.asking())
                        case "message" if request["again"]:  # more calls of the same turn
                            job.messages[-1]["tool_calls"] += request["message"]["tool_calls"]
                        case "message":
                            job.messages.append(request["message"])
                        case "end":
                            if not (error := request.get("error")):
                                return Stop(request["stop"])
                            if TOO_LONG.search(error) and request["status"] in (0, 400, 413):
                                return Stop.CONTEXT
                            text = f"model at {job.base_url}: {error}"
                            raise ModelError(text, model_status=request["status"])

    async def start(self) -> None:
        """Start the runner, unless it runs; importing an agent takes it many seconds."""
        if self._process is not None and self._process.returncode is None:
            return
        await self.close()
        if not self.python.is_file():
            text = f"no such Python; ./just setup {self.kind} makes it, or set agent.python"
            raise EvalkitError(f"{self.python}: {text}")
        self._folder = Path(tempfile.mkdtemp(prefix="nanoswe-"))
        # No file of this user's home or settings may change what an agent does.
        home = {"HOME": str(self._folder), "TMPDIR": str(self._folder)}
        with (self._folder / "log").open("wb") as log:
            # The end of its stdin tells the runner that we are gone.
            streams: Any = {"stdin": asyncio.subprocess.PIPE, "stdout": log, "stderr": log}
            argv = (self.python, RUNNERS / f"run_{self.kind}.py", self._folder / "socket")
            self._process = await asyncio.create_subprocess_exec(
                *argv, **streams, env=ENV | home, start_new_session=True
            )
        while not (self._folder / "socket").exists():
            await asyncio.sleep(0.05)
            if self._process.returncode is not None:
                raise EvalkitError(f"no runner of {self.kind}: {self._log()}")

    def _log(self) -> str:
        text = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
        return " ".join(text[-1000:].split()) or "it says nothing"
