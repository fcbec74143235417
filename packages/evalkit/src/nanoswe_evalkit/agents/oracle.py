"""`oracle`: applies the task's gold patch, exactly as an agent's edits would arrive.

In: a job whose task folder has solution/gold.patch. Out: FINISHED. Refuses (EvalkitError) a gold
patch that does not apply.
"""

from nanoswe_evalkit.agents.base import Job
from nanoswe_evalkit.agents.nop import NopAgent
from nanoswe_evalkit.outcome import EvalkitError, Stop


class OracleAgent(NopAgent):
    """Scores 1 on every sound task."""

    async def run(self, job: Job) -> Stop:
        gold = (job.task.path / "solution" / "gold.patch").read_bytes()
        done = await job.sandbox.run(["git", "apply", "-"], stdin=gold)
        if done.exit_code:
            text = " ".join(done.stdout.decode(errors="replace").split())
            raise EvalkitError(f"{job.task.task_id}: the gold patch does not apply: {text}")
        return Stop.FINISHED
