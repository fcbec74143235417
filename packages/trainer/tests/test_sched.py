"""The deadline rule under random durations: nothing too old, nothing lost, no deadlock, no bias."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoswe_trainer.sched import Schedule


def simulate(
    plan: Schedule, steps: int, seed: int, step_sec: float = 1.0
) -> list[list[tuple[int, int]]]:
    """Each step's (group, version at admission), with lognormal durations in simulated time."""
    rng = random.Random(seed)
    now, following = 0.0, 0
    ends: list[tuple[float, int]] = []
    admitted: dict[int, int] = {}
    out = []
    while len(out) < steps:
        while plan.may_admit:
            plan.admit(following)
            admitted[following] = plan.version
            heapq.heappush(ends, (now + rng.lognormvariate(0, 1.2), following))
            following += 1
        if plan.full:
            out.append([(g, admitted[g]) for g in sorted(plan.batch)])
            plan.trained()
            now += step_sec
            continue
        assert ends, "nobody to wait for, and no batch"
        now, group = max(now, ends[0][0]), heapq.heappop(ends)[1]
        plan.finish(group)
    return out


shapes = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))


@given(shapes, st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_no_group_is_too_old_and_none_is_lost(shape: tuple[int, int, int], seed: int) -> None:
    per_step, depth, spare = shape
    plan = Schedule(per_step, depth, depth + spare)
    steps = simulate(plan, 30, seed)
    for version, batch in enumerate(steps):
        assert len(batch) == per_step
        assert all(0 <= version - admitted <= depth + spare for _, admitted in batch)
    seen = [group for batch in steps for group, _ in batch]
    assert len(seen) == len(set(seen)) and not set(seen) & set(plan.live)
    assert sorted(seen + list(plan.live)) == list(range(len(seen) + len(plan.live)))


@given(st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_depth_0_is_synchronous(per_step: int, seed: int) -> None:
    steps = simulate(Schedule(per_step), 10, seed)
    assert steps == [[(step * per_step + i, step) for i in range(per_step)] for step in range(10)]


def test_short_trials_are_not_preferred() -> None:
    """Where duration and reward go together, the batches' mix must still be the offered one."""
    per_step, steps = 8, 400
    plan = Schedule(per_step, 1, 2)
    trained = sorted(group for batch in simulate(plan, steps, 1) for group, _ in batch)
    # every group is trained within the bound, so what is missing of the first N can only be live
    assert len(trained) == per_step * steps
    assert trained[-1] - len(trained) < 2 * per_step


def test_the_batch_waits_for_the_groups_it_names() -> None:
    plan = Schedule(2, 1, 1)
    for group in range(4):
        plan.admit(group)
    assert not plan.may_admit
    plan.finish(3)
    plan.finish(2)
    assert plan.batch == [3, 2] or plan.full  # both may go first: 0 and 1 fit in the next step
    plan.trained()
    for group in (4, 5):
        plan.admit(group)
    plan.finish(5)
    plan.finish(4)
    assert plan.batch == []  # 0 and 1 are due now: no place for anybody else
    plan.finish(1)
    plan.finish(0)
    assert plan.full and sorted(plan.batch) == [0, 1]


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="max_age >= depth"):
        Schedule(2, 2, 1)
    plan = Schedule(1)
    plan.admit(0)
    for wrong in (lambda: plan.admit(1), lambda: plan.finish(7), plan.trained):
        with pytest.raises(ValueError):
            wrong()
