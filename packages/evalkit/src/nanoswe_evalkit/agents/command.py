"""`command`: any program that lives inside the sandbox; the model is all that it can reach.

In: a shell command. Out: FINISHED when it exits, MAX_TURNS when it asks too often, CONTEXT. It runs
in the work directory with INSTRUCTION, MODEL, OPENAI_BASE_URL and ANTHROPIC_BASE_URL; a forwarder
beside it (runners/forward.py) hands each request to us over the sandbox's terminal, and gets the
answer whole. Key, model and temperature are set here. Refuses (EvalkitError) a sandbox without a
shell, bash or python3, and a command whose program isn't there.
"""

import asyncio
import json
import os
import re
from contextlib import suppress
from typing import Any

from nanoswe_evalkit.agents.base import Job, ModelError, ServedAgent, is_too_long, refused
from nanoswe_evalkit.agents.runner import RUNNERS
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import MIB

FORWARDER = (RUNNERS / "forward.py").read_text(encoding="utf-8")
CHAT = tuple(f"POST /v1/{name}" for name in ("chat/completions", "messages", "responses"))
# All that a program may ask for. No word of its own is in a URL: our key would go anywhere.
ROUTES = (*CHAT, "POST /v1/messages/count_tokens", "GET /v1/models")
SERVICE = (401, 403, 404, 408, 429)  # refusals that are not about what a program sent
PROBE = 'python3 -c "import tty" && { [ -z "$0" ] || command -v "$0"; }'


class CommandAgent(ServedAgent):
    def __init__(self, command: str, max_turns: int) -> None:
        super().__init__(max_turns)
        self.command = command

    async def run(self, job: Job) -> Stop:
        job.facts.update(command=self.command, model_calls=0, error="")
        # Whatever ends it after this is its own doing.
        word = re.match(r"\s*([\w./+-]*)(?=[\s;&|]|$)", self.command)
        program = word[1] if word else ""
        if (await job.sandbox.run(["bash", "-c", PROBE, program])).exit_code:
            raise EvalkitError(f"agent.command cannot be run: no bash, python3 or {program}")
        env = {"INSTRUCTION": job.task.instruction, "MODEL": job.model.name}
        argv = ["python3", "-c", FORWARDER, self.command]
        async with job.sandbox.shell(env, argv) as terminal:
            reader = asyncio.StreamReader(limit=64 * MIB)
            protocol, end = asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(terminal))
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, end)
            calls = set[asyncio.Task[None]]()
            try:
                while "exit" not in (request := await _next(reader)):
                    if job.facts["model_calls"] >= self.max_turns:
                        return Stop.MAX_TURNS
                    calls.add(asyncio.create_task(self._forward(job, terminal, request)))
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                transport.close()
        job.facts.update(exit_code=request["exit"], output=str(request.get("output", ""))[-20000:])
        status, error = job.facts.get("model_status", 0), job.facts["error"]
        if is_too_long(status, error):
            return Stop.CONTEXT
        own = 400 <= status < 500 and status not in SERVICE and job.facts["model_calls"]
        if error and not own:
            raise ModelError(error)
        return Stop.FINISHED

    async def _forward(self, job: Job, terminal: int, request: dict[str, Any]) -> None:
        """Answer a request, by what the model's service says, and type that into the sandbox."""
        route = f"{request.get('method')} {str(request.get('path')).partition('?')[0]}"
        answer = {"status": 404, "type": "text/plain", "body": f"only {', '.join(ROUTES)}"}
        if route in ROUTES:
            answer |= await self._ask(job, route, str(request.get("body") or ""))
        data = json.dumps({"id": request.get("id"), **answer}).encode() + b"\n"
        while data:
            try:
                data = data[os.write(terminal, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.005)

    async def _ask(self, job: Job, route: str, text: str) -> dict[str, Any]:
        method, _, path = route.partition(" /v1")
        try:
            body = json.loads(text or "{}")
            if route in CHAT:
                body |= {"model": job.model.name, "temperature": job.model.temperature}
                body |= job.model.sampling
        except (ValueError, TypeError, RecursionError) as error:
            return {"status": 400, "body": f"not a JSON object: {error}"}
        try:
            response = await self.ask(job, method, path, body)
        except ModelError as error:
            job.facts.update(error.facts, error=str(error))
            return {"status": 502, "body": str(error)}
        if route in CHAT and response.status_code == 200:
            job.facts.update(error="", model_calls=job.facts["model_calls"] + 1)
            _record(job, body, response.text)
        elif route in CHAT:
            failure = refused(job.base_url, response)
            job.facts.update(failure.facts, error=str(failure))
        kind = response.headers.get("content-type", "text/plain")
        return {"status": response.status_code, "body": response.text, "type": kind}


async def _next(reader: asyncio.StreamReader) -> dict[str, Any]:
    """What the forwarder says next, past the echo of a terminal that is not raw yet, and noise.

    One that says nothing any more was killed, or what it says has no end: the agent's end.
    """
    while True:
        line = b""
        with suppress(OSError, ValueError):  # a terminal's way to say that nobody is there
            line = await reader.readline()
        if not line:
            return {"exit": None}
        with suppress(ValueError, TypeError, RecursionError):
            return dict(json.loads(line))


def _record(job: Job, body: dict[str, Any], reply: str) -> None:
    """The conversation as the program last sent it, and the reply where it is not streamed."""
    said, message = body.get("messages"), {"content": ""}
    if isinstance(said, list) and all(isinstance(m, dict) and "role" in m for m in said):
        job.messages[:] = said
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        found = json.loads(reply)
        message = dict(found["choices"][0]["message"] if "choices" in found else found)
    job.messages.append({**message, "role": "assistant"})
