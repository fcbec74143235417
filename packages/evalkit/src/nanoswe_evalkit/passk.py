"""Counting honestly: avg@k, unbiased pass@k, and 95 % intervals.

In: per task, how many of its n graded trials resolved (c); trials without a reward are left out
unless `strict`. Out: estimates, Wilson's interval around each; around a difference, and where
repositories are what is drawn, a bootstrap, which repeats for a seed. Nothing draws attempts anew:
by simulation that covers too much for avg@k, and far too little for pass@k, which it biases.
Refuses (ValueError) no task at all, and a k that no task has attempts for.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean

from nanoswe_evalkit.trial import Trial

Counts = Mapping[str, tuple[int, int]]
RESAMPLES = 2000
MAX_INFRA_RATE = 0.01
Z = NormalDist().inv_cdf(0.975)
POWER_Z = NormalDist().inv_cdf(0.8)
# Mean variance of one attempt at a task, where the tasks' difficulty is Beta(0.35, 0.35).
ATTEMPT_VARIANCE = 0.35**2 / (0.7 * 1.7)


@dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    tasks: int


def counts_of(trials: Sequence[Trial], strict: bool = False) -> dict[str, tuple[int, int]]:
    """Task id → (graded, resolved); `strict` counts a trial without a reward as not resolved."""
    counts: dict[str, tuple[int, int]] = {}
    for trial in trials:
        if trial.reward is not None or strict:
            n, c = counts.get(trial.task_id, (0, 0))
            counts[trial.task_id] = (n + 1, c + int(trial.reward or 0))
    return counts


def no_headline(trials: Sequence[Trial]) -> str:
    """Why these trials give no headline, or nothing."""
    lost = sum(trial.reward is None for trial in trials)
    if lost <= MAX_INFRA_RATE * len(trials):
        return "" if trials else "no trial"
    what = f"{lost} of {len(trials)} trials have no reward, more than {MAX_INFRA_RATE:.0%}"
    return f"no headline: {what}; run again to repeat those"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n trials, drawn without replacement, hold one of the c resolved.

    1 - C(n-c, k) / C(n, k); Chen et al. 2021, https://arxiv.org/abs/2107.03374.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} graded attempts, not {n}")
    return 1 - comb(n - c, k) / comb(n, k)


def avg_at_k(counts: Counts) -> Estimate:
    """Mean over tasks of the resolved share (which is pass@1)."""
    return pass_estimate(counts, 1)


def pass_estimate(counts: Counts, k: int) -> Estimate:
    """pass@k over the tasks with at least k graded attempts."""
    values = [pass_at_k(n, c, k) for n, c in counts.values() if n >= k]
    if not values:
        raise ValueError(f"no task has {k} graded attempts")
    value = fmean(values)
    # As many yes-or-no tasks as would vary like these; where all are alike, themselves. The less
    # the variance follows from the mean, the more it is an estimate: that is Student's t.
    n, most, spread = len(values), value * (1 - value), fmean((v - value) ** 2 for v in values)
    if spread <= 1e-12:
        return Estimate(value, *wilson(value, n), n)
    free = 1 - spread / most
    alike = n * most / (spread * (1 + free / (n - 1)))
    z = Z + free * (_student(n - 1) - Z)
    return Estimate(value, *wilson(value, alike, z), n)


def by_repository(counts: Counts, seed: int = 0) -> Estimate | None:
    """avg@k, its interval of whole repositories (`owner__name-1`); None with fewer than two."""
    groups: dict[str, list[float]] = {}
    for task, (n, c) in sorted(counts.items()):
        groups.setdefault(task.rpartition("-")[0], []).append(c / n)
    if len(groups) < 2:
        return None
    value = fmean(c / n for n, c in counts.values())
    return Estimate(value, *_bootstrap(list(groups.values()), seed), len(counts))


def paired_difference(a: Counts, b: Counts, seed: int = 0) -> Estimate:
    """avg@k of `b` minus `a` over the tasks both have; tasks are resampled as pairs."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise ValueError("the two runs share no graded task")
    gains = [[pass_at_k(*b[t], 1) - pass_at_k(*a[t], 1)] for t in shared]
    return Estimate(fmean(gain for (gain,) in gains), *_bootstrap(gains, seed), len(gains))


def detectable_difference(tasks: int, attempts: int) -> float:
    """The smallest difference in avg@k between two runs that 80 % of such pairs would show."""
    return (Z + POWER_Z) * sqrt(2 * ATTEMPT_VARIANCE / (tasks * attempts))


def wilson(share: float, n: float, z: float = Z) -> tuple[float, float]:
    """Wilson's score interval of a share of n (1927)."""
    center, spread = share + z**2 / (2 * n), z * sqrt(share * (1 - share) / n + (z / n) ** 2 / 4)
    scale = 1 + z**2 / n
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def _student(free: int) -> float:
    """The 97.5 % point of Student's t, by its expansion in 1 / degrees of freedom (Fisher 1941)."""
    terms = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    last = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + terms[0] / free + terms[1] / free**2 + last / free**3


def _bootstrap(groups: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """The 95 % interval of the mean of all values, groups drawn whole with replacement."""
    rng, sums = random.Random(seed), [(sum(group), len(group)) for group in groups]
    means = []
    for _ in range(RESAMPLES):
        totals, sizes = zip(*rng.choices(sums, k=len(sums)), strict=True)
        means.append(sum(totals) / sum(sizes))
    means.sort()
    edge = int(0.025 * RESAMPLES)
    return means[edge], means[-1 - edge]
