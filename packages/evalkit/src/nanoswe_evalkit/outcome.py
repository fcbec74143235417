"""How a trial ended (`Stop`), what it was worth (`Outcome`), and the reward of each.

In: nothing. Out: two closed sets and one pure function. A reward of None means that our machinery
failed, never the agent: such a trial is retried within a bound, leaves the denominators and is
counted beside every score.
"""

from enum import StrEnum


class EvalkitError(Exception):
    """Base of every error evalkit names; its text is one line that says what to do."""


class Stop(StrEnum):
    """How the agent ended."""

    FINISHED = "finished"
    PLAIN_TEXT = "plain_text"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    TIMEOUT = "timeout"
    STUCK = "stuck"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """The verdict."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    NO_PATCH = "no_patch"
    PATCH_REJECTED = "patch_rejected"
    TAMPER = "tamper"
    INFRA_ERROR = "infra_error"
    GRADER_ERROR = "grader_error"


def reward_of(outcome: Outcome) -> float | None:
    """1.0 for resolved, None where our machinery failed, 0.0 for the rest."""
    if outcome in (Outcome.INFRA_ERROR, Outcome.GRADER_ERROR):
        return None
    return float(outcome is Outcome.RESOLVED)
