"""The `Agent` protocol, the job it is given, the error it may raise; `nop` and `oracle`.

In: a job: a task, a started sandbox, the model and its base URL (OpenAI style, ending in /v1). Out:
how it stopped; the transcript so far is in the job's `messages` however it ends, what the agent has
to say about itself in `facts`. An agent object serves many trials at once. An error of the model's
service is ModelError: ours, never the agent's.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoswe_evalkit.foreign import solve
from nanoswe_evalkit.grading import PatchError
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import Sandbox
from nanoswe_harbor.task import Task

Message = dict[str, Any]


class ModelError(EvalkitError):
    """The model's service failed or answered nonsense."""


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

    @property
    def headers(self) -> dict[str, str]:  # as either API wants its key
        bearer = {"authorization": f"Bearer {self.api_key}", "x-api-key": self.api_key}
        return bearer if self.api_key else {}


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
        """Around a model call: `facts` has the seconds of all together."""
        began = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - began
            self.facts["model_sec"] = self.facts.get("model_sec", 0) + took


class Agent(Protocol):
    """Works on a task; its tools act in the sandbox, its loop does not."""

    async def run(self, job: Job) -> Stop: ...

    async def close(self) -> None: ...


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
