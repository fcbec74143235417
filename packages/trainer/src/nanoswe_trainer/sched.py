"""When a group of trials may be trained: a hard bound on age without dropping data, as a pure state
machine.

In: groups admitted and finished, and steps taken; no clock, no task, no tensor. Out: which
finished groups make the next batch. A group admitted at
version v is trained at v + max_age at the latest: a finished group may enter the batch only while
those that remain can still meet their deadlines, earliest first. `depth` batches beyond the one
being filled may be under way; depth 0 with max_age 0 is exactly synchronous. Refuses a bound
tighter than the depth, and a group it does not hold.
"""

from dataclasses import dataclass, field


@dataclass
class Schedule:
    """`live` holds each group's deadline from its admission until it is trained."""

    per_step: int
    depth: int = 0
    max_age: int = 0
    version: int = 0
    live: dict[int, int] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)
    _finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.per_step < 1 or not 0 <= self.depth <= self.max_age:
            raise ValueError("want per_step >= 1 and max_age >= depth >= 0")

    @property
    def full(self) -> bool:
        return len(self.batch) == self.per_step

    @property
    def may_admit(self) -> bool:
        return len(self.live) < (self.depth + 1) * self.per_step

    def admit(self, group: int) -> None:
        """Its trials start now, under the present version."""
        if not self.may_admit or group in self.live:
            raise ValueError(f"group {group} cannot be admitted")
        self.live[group] = self.version + self.max_age

    def finish(self, group: int) -> None:
        """Its trials have ended."""
        if group not in self.live:
            raise ValueError(f"group {group} is not under way")
        self._finished.add(group)
        self._fill()

    def trained(self) -> None:
        """The batch has become a step."""
        if not self.full:
            raise ValueError("the batch is not full")
        for group in self.batch:
            del self.live[group]
        self._finished -= set(self.batch)
        self.batch = []
        self.version += 1
        self._fill()

    def _fill(self) -> None:
        for group in sorted(self._finished - set(self.batch), key=lambda g: (self.live[g], g)):
            if self.full:
                return
            if self._feasible(group):
                self.batch.append(group)

    def _feasible(self, group: int) -> bool:
        """Could every other group still be trained by its deadline if `group` took a place now?"""
        room = self.per_step - len(self.batch) - 1
        others = sorted(d for g, d in self.live.items() if g != group and g not in self.batch)
        return all(
            rank <= room + (deadline - self.version) * self.per_step
            for rank, deadline in enumerate(others, 1)
        )
