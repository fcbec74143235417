"""`nop`: does nothing. In: a job. Out: FINISHED. It scores 0 on every sound task."""

from nanoswe_evalkit.agents.base import Job
from nanoswe_evalkit.outcome import Stop


class NopAgent:
    """The other half of every certificate."""

    async def run(self, job: Job) -> Stop:
        return Stop.FINISHED

    async def close(self) -> None:
        """Nothing is held."""
