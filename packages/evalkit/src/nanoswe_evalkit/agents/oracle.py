"""`nop` does nothing, `oracle` applies the gold patch as an agent's edits would arrive.

In: a job. Out: FINISHED. On every sound task the one scores 0 and the other 1. Refuses
(EvalkitError) a gold patch that does not apply.
"""

from nanoswe_evalkit.agents.base import Job
from nanoswe_evalkit.foreign import solve
from nanoswe_evalkit.outcome import EvalkitError, Stop


class NopAgent:
    async def run(self, job: Job) -> Stop:
        return Stop.FINISHED

    async def close(self) -> None: ...


class OracleAgent(NopAgent):
    async def run(self, job: Job) -> Stop:
        if not job.task.base_commit:
            await solve(job.task, job.sandbox)
            return Stop.FINISHED
        gold = (job.task.path / "solution" / "gold.patch").read_bytes()
        done = await job.sandbox.run(["git", "apply", "-"], stdin=gold)
        if done.exit_code:
            text = " ".join(done.stdout.decode(errors="replace").split())
            raise EvalkitError(f"{job.task.task_id}: the gold patch does not apply: {text}")
        return Stop.FINISHED
