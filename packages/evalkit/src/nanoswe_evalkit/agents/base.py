"""The `Agent` protocol, the job it is given, the error it may raise; `nop` and `oracle`.

In: a job: a task, a started sandbox, the model and its base URL (OpenAI style, ending in /v1). Out:
how it stopped; the transcript so far is in the job's `messages` however it ends, what the agent has
to say about itself in `facts`. An agent object serves many trials at once. An error of the model's
service is ModelError: ours, never the agent's.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from nanoswe_evalkit.foreign import solve
from nanoswe_evalkit.grading import PatchError
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import Sandbox
from nanoswe_harbor.task import Task

Message = dict[str, Any]
# The words by which services refuse a conversation for its length.
TOO_LONG = re.compile(r"context[ _-]?(length|window|size)|prompt is too long", re.IGNORECASE)


class ModelError(EvalkitError):
    """The model's service failed or answered nonsense; `facts` (status, pause) are kept."""

    def __init__(self, text: str, **facts: float) -> None:
        super().__init__(text)
        self.facts = facts


def is_too_long(status: int, text: str) -> bool:
    return status in (400, 413) and bool(TOO_LONG.search(text))


@dataclass(frozen=True)
class ModelConfig:
    """What is sent with each request; `seed` differs per trial. The key is never written."""

    name: str
    temperature: float = 1.0
    max_tokens: int = 1024
    seed: int = 0
    timeout_sec: float = 600
    sampling: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Job:
    task: Task
    sandbox: Sandbox
    base_url: str
    model: ModelConfig
    messages: list[Message] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a model call: `facts` has all seconds, and those of one never answered."""
        began = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            self.facts["unanswered_sec"] = round(time.monotonic() - began, 4)
            raise
        finally:
            took = time.monotonic() - began
            self.facts["model_sec"] = self.facts.get("model_sec", 0) + took


def refused(base_url: str, response: httpx.Response) -> ModelError:
    """The error that an answer is; a date in Retry-After says no number of seconds."""
    facts: dict[str, float] = {"model_status": response.status_code}
    with suppress(KeyError, ValueError):
        facts["retry_after_sec"] = max(0.0, float(response.headers["retry-after"]))
    text = f"HTTP {response.status_code} {' '.join(response.text.split())[:300]}"
    return ModelError(f"model at {base_url}: {text}", **facts)


class Agent(Protocol):
    """Works on a task; its tools act in the sandbox, its loop does not."""

    async def run(self, job: Job) -> Stop: ...

    async def close(self) -> None: ...


class ServedAgent:
    """Holds the one HTTP client that all trials share."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(), timeout=None)

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, job: Job, method: str, path: str, body: Any) -> httpx.Response:
        """What the model's service answers, whatever its status; ModelError where it does not."""
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        if key := job.model.api_key:  # as either API wants it
            headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
        # In ASCII: a model may write half a character, which has no other form.
        content = json.dumps(body) if method == "POST" else ""
        url = job.base_url.rstrip("/") + path
        try:
            with job.asking():  # httpx's own clock begins anew at each byte
                async with asyncio.timeout(job.model.timeout_sec):
                    return await self._client.request(method, url, content=content, headers=headers)
        except (httpx.HTTPError, TimeoutError) as error:
            text = f"model at {job.base_url}: {type(error).__name__} {error}"
            raise ModelError(text, model_status=0) from error


class NopAgent:
    """Does nothing, and scores 0."""

    async def close(self) -> None: ...

    async def run(self, job: Job) -> Stop:
        return Stop.FINISHED


class OracleAgent(NopAgent):
    """Applies the gold patch as edits would arrive, and scores 1 on every sound task."""

    async def run(self, job: Job) -> Stop:
        if not job.task.base_commit:
            await solve(job.task, job.sandbox)
            return Stop.FINISHED
        gold = (job.task.path / "solution" / "gold.patch").read_bytes()
        done = await job.sandbox.run(["git", "apply", "-"], stdin=gold)
        if done.exit_code:
            text = " ".join(done.stdout.decode(errors="replace").split())
            raise PatchError(f"{job.task.task_id}: the gold patch does not apply: {text}")
        return Stop.FINISHED
