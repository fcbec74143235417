"""Counting honestly: avg@k, unbiased pass@k, and 95 % intervals.

In: per task, how many of its n graded trials resolved (c); trials without a reward are left out,
and counted by the caller. Out: estimates with two-level bootstrap intervals (tasks, then attempts),
which repeat for a seed. Refuses (ValueError) no task at all, and a k that no task has attempts for.
"""

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb

from nanoswe_evalkit.trial import Trial

Counts = Mapping[str, tuple[int, int]]
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int


def counts_of(trials: Sequence[Trial]) -> dict[str, tuple[int, int]]:
    """Task id → (graded, resolved). A task with no graded trial is not in it."""
    counts: dict[str, tuple[int, int]] = {}
    for trial in trials:
        if trial.reward is not None:
            n, c = counts.get(trial.task_id, (0, 0))
            counts[trial.task_id] = (n + 1, c + int(trial.reward))
    return counts


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n trials, drawn without replacement, hold one of the c resolved.

    1 - C(n-c, k) / C(n, k); Chen et al. 2021, https://arxiv.org/abs/2107.03374.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} graded attempts, not {n}")
    return 1 - comb(n - c, k) / comb(n, k)


def avg_at_k(counts: Counts, seed: int = 0) -> Estimate:
    """Mean over tasks of the resolved share (which is pass@1)."""
    return pass_estimate(counts, 1, seed)


def pass_estimate(counts: Counts, k: int, seed: int = 0) -> Estimate:
    """pass@k over the tasks with at least k graded attempts."""
    rows = [row for _, row in sorted(counts.items()) if row[0] >= k]
    if not rows:
        raise ValueError(f"no task has {k} graded attempts")
    value = sum(pass_at_k(n, c, k) for n, c in rows) / len(rows)
    tables = [_table(n, c, k) for n, c in rows]
    rng = random.Random(seed)
    means = [
        sum(_draw(rng, rng.choice(tables)) for _ in rows) / len(rows) for _ in range(RESAMPLES)
    ]
    return Estimate(value, *_interval(means), len(rows))


def paired_difference(a: Counts, b: Counts, seed: int = 0) -> Estimate:
    """avg@k of `b` minus `a` over the tasks both have; tasks are resampled as pairs."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError("the two runs share no graded task")
    value = sum(pass_at_k(*b[t], 1) - pass_at_k(*a[t], 1) for t in shared) / len(shared)
    tables = [(_table(*a[t], 1), _table(*b[t], 1)) for t in shared]
    rng = random.Random(seed)
    means = []
    for _ in range(RESAMPLES):
        pairs = [rng.choice(tables) for _ in shared]
        means.append(sum(_draw(rng, y) - _draw(rng, x) for x, y in pairs) / len(shared))
    return Estimate(value, *_interval(means), len(shared))


_Table = tuple[list[float], list[float]]


def _table(n: int, c: int, k: int) -> _Table:
    """(cumulative chances, pass@k) of each resolved count that n redrawn attempts may show."""
    p = c / n
    chances = [comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(n + 1)]
    return list(accumulate(chances)), [pass_at_k(n, i, k) for i in range(n + 1)]


def _draw(rng: random.Random, table: _Table) -> float:
    cumulative, values = table
    return values[min(bisect(cumulative, rng.random()), len(values) - 1)]


def _interval(means: list[float]) -> tuple[float, float]:
    means.sort()
    return means[int(0.025 * len(means))], means[int(0.975 * len(means)) - 1]
