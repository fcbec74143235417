"""Trajectory and Sample: what a sealed session gives a trainer, token by token, and its JSONL form.

In: rows cut by `session.seal`. Out: frozen records, checked on construction, that survive a JSONL
round trip bit for bit. Refuses rows that do not line up, sampled tokens without a finite logprob,
and an unknown schema number.
"""

import fcntl
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from nanoswe_proxy.errors import TrajectoryError

Logprob = Annotated[float, BeforeValidator(lambda x: math.nan if x is None else x)]


class Provenance(StrEnum):
    """Where a token came from; one letter per token. The loss mask is a view: SAMPLED trains."""

    SAMPLED = "s"  # sampled by the engine, owned (trained) by this row
    SCAFFOLD = "c"  # written by the template
    OBSERVED = "o"  # system, user and tool text
    FOREIGN = "f"  # assistant text that no engine of this session sampled
    REPLAYED = "r"  # sampled in this session, but owned by another row or node
    SYNTHETIC = "y"  # closes a turn that was cut off


@dataclass(frozen=True)
class Turn:
    """One model call. `stop` is the engine's cause: stop, length, stop_string, aborted, lost (in a
    crash); `parse`: text, calls, malformed.
    """

    index: int
    parent: int  # the turn it extends, -1 for a root
    prompt_tokens: int
    sampled_tokens: int
    stop: str
    finish_reason: str
    parse: str
    delivery: str
    fork: str  # why this turn's prompt did not extend the latest one; "" when it did
    requested: dict  # sampling values the agent asked for; the session's own were used
    masked: str = ""  # why its tokens are not trained; "" when they are


@dataclass(frozen=True)
class Sample:
    """One token row. All five columns have one entry per token.

    `logprobs` is NaN, `versions` and `turns` are -1 wherever a token was not sampled (or is owned
    by another row). `stops` maps each turn index owned by this row to its stop cause.
    """

    tokens: tuple[int, ...]
    provenance: str
    logprobs: tuple[Logprob, ...]
    versions: tuple[int, ...]
    turns: tuple[int, ...]
    stops: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = (self.tokens, self.provenance, self.logprobs, self.versions, self.turns)
        if len({len(c) for c in columns}) != 1:
            raise TrajectoryError(f"columns differ in length: {[len(c) for c in columns]}")
        for i, kind in enumerate(self.provenance):
            sampled = kind == Provenance.SAMPLED
            facts = (math.isfinite(self.logprobs[i]), self.versions[i] >= 0, self.turns[i] >= 0)
            if facts != (sampled, sampled, sampled):
                raise TrajectoryError(f"token {i} ({kind}): logprob, version, turn are {facts}")
        if set(self.stops) != {t for t in self.turns if t >= 0}:
            raise TrajectoryError("stops must name exactly the turns that this row owns")

    @property
    def mask(self) -> tuple[bool, ...]:
        """True where the token is trained."""
        return tuple(kind == Provenance.SAMPLED for kind in self.provenance)


@dataclass(frozen=True)
class Conservation:
    """sampled = trained + sum(masked by reason), or the export refuses."""

    sampled: int
    trained: int
    masked: dict[str, int]

    def __post_init__(self) -> None:
        if self.sampled != self.trained + sum(self.masked.values()):
            raise TrajectoryError(f"tokens were lost or doubled: {self}")


@dataclass(frozen=True)
class Trajectory:
    """A sealed session: every turn, every branch. `samples` has one row per surviving leaf."""

    trial_id: str
    try_: int
    seed_key: str
    temperature: float
    turns: tuple[Turn, ...]
    samples: tuple[Sample, ...]
    conservation: Conservation
    incomplete: tuple[str, ...] = ()  # what is known to be missing
    notes: dict = field(default_factory=dict)  # the reward and whatever else was annotated
    calls: tuple[dict, ...] = ()  # that a provider answered: what was said, without token ids
    schema: Literal["trajectory/1"] = "trajectory/1"

    def __post_init__(self) -> None:
        owned = [t for s in self.samples for t in s.stops]
        if len(owned) != len(set(owned)):
            raise TrajectoryError("a turn is owned by two rows")
        trained = sum(s.provenance.count(Provenance.SAMPLED) for s in self.samples)
        if trained != self.conservation.trained:
            raise TrajectoryError("conservation does not count the tokens of the rows")

    def to_json(self) -> str:
        """One JSONL line. NaN is written as null."""
        return RECORD.dump_json(self).decode()


RECORD = TypeAdapter(Trajectory)


def from_json(line: str) -> Trajectory:
    """The inverse of `to_json`; checks everything again."""
    try:
        return RECORD.validate_json(line)
    except ValidationError as error:
        raise TrajectoryError(f"no trajectory: {error.errors()[0]}") from error


def write_jsonl(path: Path, *trajectories: Trajectory) -> None:
    """Append to `path`."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other workers append, too; closing gives it up
        for trajectory in trajectories:
            file.write(trajectory.to_json() + "\n")


def read_jsonl(path: Path) -> Iterator[Trajectory]:
    """Every trajectory of a file, in order."""
    with path.open(encoding="utf-8") as file:
        yield from map(from_json, file)
