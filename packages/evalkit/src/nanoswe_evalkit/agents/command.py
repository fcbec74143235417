"""`command`: any program that lives inside the sandbox; the model is all that it can reach.

In: a shell command. Out: FINISHED when it exits, MAX_TURNS when it asks too often, CONTEXT. It runs
in the work directory with INSTRUCTION, MODEL, OPENAI_BASE_URL and ANTHROPIC_BASE_URL; a forwarder
beside it (runners/forward.py) hands each request to us over the sandbox's terminal, and gets the
answer whole. Key, model and temperature are set here. Refuses (EvalkitError) a sandbox without a
shell or python3, and a command that isn't there.
"""

import asyncio
import json
import os
from contextlib import suppress
from typing import Any

import httpx

from nanoswe_evalkit.agents.base import Job, ModelError
from nanoswe_evalkit.agents.runner import RUNNERS
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import MIB

FORWARDER = (RUNNERS / "forward.py").read_text(encoding="utf-8")
CHAT = ("/chat/completions", "/messages", "/responses")
NOT_THERE = (126, 127)


class CommandAgent:
    """Holds the one HTTP client that all trials share."""

    def __init__(self, command: str, max_turns: int) -> None:
        self.command, self.max_turns = command, max_turns
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits())

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, job: Job) -> Stop:
        job.facts.update(command=self.command, model_calls=0, error="")
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
        job.facts.update(exit_code=request["exit"], output=request["output"])
        if request["exit"] in NOT_THERE:
            raise EvalkitError(f"agent.command cannot be run: {request['output'].strip()[-300:]}")
        if "context" in job.facts["error"].lower():
            return Stop.CONTEXT
        if job.facts["error"]:
            raise ModelError(f"model at {job.base_url}: {job.facts['error']}")
        return Stop.FINISHED

    async def _forward(self, job: Job, terminal: int, request: dict[str, Any]) -> None:
        """Ask the model's service, and type its answer into the sandbox."""
        path, chat = request["path"].partition("?")[0], request["path"].split("?")[0].endswith(CHAT)
        url = job.base_url.rstrip("/").removesuffix("/v1") + path
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        headers |= job.model.headers
        answer = {"id": request["id"], "status": 502, "type": "text/plain", "body": ""}
        try:
            body = json.loads(request["body"] or "{}")
            if chat:
                body |= {"model": job.model.name, "temperature": job.model.temperature}
                body |= job.model.sampling
            with job.asking():
                response = await self._client.request(
                    request["method"], url, headers=headers, timeout=job.model.timeout_sec,
                    content=json.dumps(body) if request["body"] else b""
                )  # fmt: skip
            answer |= {"status": response.status_code, "body": response.text}
            answer["type"] = response.headers.get("content-type", "text/plain")
        except (httpx.HTTPError, ValueError, TypeError) as error:
            answer["body"] = f"{type(error).__name__} {error}"
        if chat:
            failed = answer["status"] != 200
            job.facts["error"] = f"HTTP {answer['status']} {answer['body'][:300]}" if failed else ""
            job.facts["model_calls"] += not failed
            if not failed:
                _record(job, body, answer["body"])
        data = json.dumps(answer).encode() + b"\n"
        while data:
            try:
                data = data[os.write(terminal, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.005)


async def _next(reader: asyncio.StreamReader) -> dict[str, Any]:
    """What the forwarder says next, past the echo of a terminal that is not raw yet."""
    while True:
        line = b""
        with suppress(OSError):  # so a terminal says that nobody is there any more
            line = await reader.readline()
        if not line:
            raise EvalkitError("command: its forwarder died; it needs python3 in the sandbox")
        with suppress(ValueError):
            return dict(json.loads(line))


def _record(job: Job, body: dict[str, Any], reply: str) -> None:
    """The conversation as the program last sent it, and the reply where it is not streamed."""
    job.messages[:] = body.get("messages") or job.messages
    message = {"role": "assistant", "content": ""}
    with suppress(ValueError, LookupError, TypeError):
        found = json.loads(reply)
        message = found["choices"][0]["message"] if "choices" in found else found
    job.messages.append({**message, "role": "assistant"})
