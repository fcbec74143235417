"""`nop`: does nothing. In: a task. Out: FINISHED. It scores 0 on every sound task."""

from nanoswe_evalkit.agents.base import Message, ModelConfig
from nanoswe_evalkit.outcome import Stop
from nanoswe_evalkit.sandboxes.base import Sandbox
from nanoswe_harbor.task import Task


class NopAgent:
    """The other half of every certificate."""

    async def run(
        self,
        task: Task,
        sandbox: Sandbox,
        base_url: str,
        model: ModelConfig,
        messages: list[Message],
    ) -> Stop:
        return Stop.FINISHED

    async def close(self) -> None:
        """Nothing is held."""
