"""`oracle`: applies the task's gold patch, exactly as an agent's edits would arrive.

In: a task folder with solution/gold.patch. Out: FINISHED. Refuses (EvalkitError) a gold patch that
does not apply.
"""

from nanoswe_evalkit.agents.base import Message, ModelConfig
from nanoswe_evalkit.outcome import EvalkitError, Stop
from nanoswe_evalkit.sandboxes.base import Sandbox
from nanoswe_harbor.task import Task


class OracleAgent:
    """Scores 1 on every sound task."""

    async def run(
        self,
        task: Task,
        sandbox: Sandbox,
        base_url: str,
        model: ModelConfig,
        messages: list[Message],
    ) -> Stop:
        gold = (task.path / "solution" / "gold.patch").read_bytes()
        done = await sandbox.run(["git", "apply", "-"], stdin=gold)
        if done.exit_code:
            text = " ".join(done.stdout.decode(errors="replace").split())
            raise EvalkitError(f"{task.task_id}: the gold patch does not apply: {text}")
        return Stop.FINISHED

    async def close(self) -> None:
        """Nothing is held."""
