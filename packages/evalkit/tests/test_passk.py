"""pass@k by hand and by enumeration, intervals by other roads, and how often they cover."""

import random
from itertools import combinations, product
from math import comb, sqrt

import pytest

from nanoswe_evalkit import passk
from nanoswe_evalkit.evaluate import summarize
from nanoswe_evalkit.outcome import Outcome, Stop, reward_of
from nanoswe_evalkit.passk import (
    avg_at_k,
    by_repository,
    detectable_difference,
    paired_difference,
    pass_at_k,
    pass_estimate,
    wilson,
)
from nanoswe_evalkit.trial import Trial


@pytest.mark.parametrize(
    ("n", "c", "k", "want"),
    [
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (8, 2, 4, 11 / 14),  # 1 - C(6,4)/C(8,4) = 1 - 15/70
        (4, 3, 2, 1.0),  # two draws can't both miss
        (3, 0, 3, 0.0),
        (3, 1, 1, 1 / 3),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, want: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(want, abs=1e-12)


def test_pass_at_k_counts_the_draws() -> None:
    for n in range(1, 8):
        for c, k in product(range(n + 1), range(1, n + 1)):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_too_few_attempts() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="no task"):
        pass_estimate({"a": (2, 1)}, 3)
    with pytest.raises(ValueError, match="no graded task"):
        paired_difference({"a": (1, 1)}, {"b": (1, 1)})


def test_estimates() -> None:
    counts = {"a": (4, 4), "b": (4, 1), "c": (2, 0)}
    average = avg_at_k(counts)
    assert average.value == pytest.approx((1 + 0.25 + 0) / 3) and average.tasks == 3
    assert 0 <= average.low < average.value < average.high <= 1
    at_4 = pass_estimate(counts, 4)
    assert (at_4.value, at_4.tasks) == (1.0, 2)


@pytest.mark.parametrize(("c", "n"), [(0, 10), (1, 10), (7, 20), (250, 500), (9, 9)])
def test_one_attempt_has_wilsons_interval(c: int, n: int) -> None:
    """Its ends are the shares from which c of n lies exactly 1.96 standard errors away."""
    low, high = wilson(c / n, n)
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(c / n - end) == pytest.approx(1.959964 * sqrt(end * (1 - end) / n), rel=1e-6)
    counts = {str(i): (1, int(i < c)) for i in range(n)}
    estimate = avg_at_k(counts)
    assert (estimate.low, estimate.high) == pytest.approx((low, high))
    assert low < high  # all of nine resolved is not certainty


def test_interval_has_the_right_width() -> None:
    """100 tasks, half always and half never resolved: the mean has a standard error of 0.05."""
    counts = {str(i): (4, 4 * (i % 2)) for i in range(100)}
    estimate = avg_at_k(counts)
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.003)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.003)


def _difficulties(rng: random.Random, count: int) -> list[float]:
    return [rng.betavariate(0.35, 0.35) for _ in range(count)]


MORE_CASES = ((12, 4, 1), (50, 1, 1), (200, 8, 4), (500, 4, 4))


@pytest.mark.parametrize(
    ("tasks", "attempts", "k"),
    [
        (30, 4, 1),
        (30, 4, 4),
        *(pytest.param(*case, marks=pytest.mark.interop) for case in MORE_CASES),
    ],
)
def test_how_often_the_interval_covers(tasks: int, attempts: int, k: int) -> None:
    rng = random.Random(1)
    truth = sum(1 - (1 - p) ** k for p in _difficulties(rng, 50_000)) / 50_000
    hits, runs = 0, 1000
    for _ in range(runs):
        drawn = [sum(rng.random() < p for _ in range(attempts)) for p in _difficulties(rng, tasks)]
        estimate = pass_estimate({str(i): (attempts, c) for i, c in enumerate(drawn)}, k)
        hits += estimate.low <= truth <= estimate.high
    assert hits / runs == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("shape", [(0.35, 0.35), (1, 1), (1, 3), (500, 500), (200, 800)])
@pytest.mark.parametrize("tasks", [12, 50])
def test_it_covers_however_difficult_tasks_are(tasks: int, shape: tuple[float, float]) -> None:
    """From tasks that are solved always or never to tasks that are all alike."""
    rng, truth, hits, runs = random.Random(3), shape[0] / sum(shape), 0, 2000
    for _ in range(runs):
        ps = [rng.betavariate(*shape) for _ in range(tasks)]
        drawn = {str(i): (4, sum(rng.random() < p for _ in range(4))) for i, p in enumerate(ps)}
        estimate = pass_estimate(drawn, 1)
        hits += estimate.low <= truth <= estimate.high
    assert hits / runs == pytest.approx(0.95, abs=0.02)


@pytest.mark.interop
def test_how_often_the_interval_of_a_difference_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passk, "RESAMPLES", 400)
    rng, hits, runs = random.Random(2), 0, 700
    for seed in range(runs):
        a, b = {}, {}
        for i, p in enumerate(_difficulties(rng, 60)):
            a[str(i)] = (4, sum(rng.random() < p for _ in range(4)))
            b[str(i)] = (4, sum(rng.random() < p + 0.1 * (1 - p) for _ in range(4)))
        difference = paired_difference(a, b, seed)
        hits += difference.low <= 0.05 <= difference.high  # 0.1 x the mean of 1 - p
    assert hits / runs == pytest.approx(0.95, abs=0.02)


def test_the_bootstrap_equals_all_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five tasks there are 5^5 resamples: their 2.5 % and 97.5 % points."""
    a = {str(i): (4, c) for i, c in enumerate((0, 1, 2, 4, 3))}
    b = {str(i): (4, c) for i, c in enumerate((1, 1, 4, 3, 4))}
    gains = [(b[t][1] - a[t][1]) / 4 for t in a]
    means = sorted(sum(draw) / 5 for draw in product(gains, repeat=5))
    monkeypatch.setattr(passk, "RESAMPLES", 20_000)
    difference = paired_difference(a, b)
    assert difference.value == pytest.approx(0.15)
    assert difference.low == pytest.approx(means[int(0.025 * len(means))])
    assert difference.high == pytest.approx(means[-1 - int(0.025 * len(means))])
    assert paired_difference(a, b) == difference  # the same seed, the same interval


def test_pairing_removes_the_difference_between_tasks() -> None:
    a = {str(i): (1, i % 2) for i in range(100)}
    same = paired_difference(a, a)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    better = paired_difference(a, {task: (1, 1) for task in a})
    assert better.value == 0.5 and better.low > 0.38


def test_repositories_are_drawn_whole() -> None:
    """Two repositories, one all solved: a resample holds none, one or both of the good one."""
    counts = {f"a__good-{i}": (1, 1) for i in range(20)}
    counts |= {f"b__bad-{i}": (1, 0) for i in range(20)}
    estimate = by_repository(counts)
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.0, 1.0)
    assert by_repository({"a__good-1": (1, 1), "a__good-2": (1, 0)}) is None


@pytest.mark.parametrize(
    ("tasks", "attempts", "points"), [(500, 1, 5.7), (500, 4, 2.8), (50, 4, 9.0), (50, 8, 6.4)]
)
def test_smallest_detectable_difference(tasks: int, attempts: int, points: float) -> None:
    assert 100 * detectable_difference(tasks, attempts) == pytest.approx(points, abs=0.06)


def test_its_power_by_simulation() -> None:
    rng, tasks, runs = random.Random(3), 100, 400
    least = detectable_difference(tasks, 1)
    error = least / 2.8016  # z of 97.5 % + z of 80 %
    found = 0
    for _ in range(runs):
        gain = 0.0
        for p in _difficulties(rng, tasks):
            gain += (rng.random() < p) - (rng.random() < p)
        found += abs(gain / tasks + least) > 1.96 * error
    assert found / runs == pytest.approx(0.8, abs=0.05)


def _trial(task: str, attempt: int, outcome: Outcome) -> Trial:
    told = (Stop.FINISHED, outcome, reward_of(outcome), 1, "", None, {})
    return Trial(f"{task}.{attempt}", task, attempt, 0, *told)


def test_strict_valid_and_no_headline_above_one_percent() -> None:
    trials = [_trial(f"r__x-{i}", 0, Outcome.RESOLVED) for i in range(99)]
    trials.append(_trial("r__x-99", 0, Outcome.INFRA_ERROR))
    summary = summarize(trials, [1], 0)
    assert (summary["infra_rate"], summary["no_reward"]) == (0.01, 1)
    assert summary["headline"].startswith("100.0% [96.")
    assert summary["scores"]["avg@1"]["value"] == 1.0
    assert summary["scores"]["avg@1 strict"]["value"] == 0.99
    assert "r__x-99" not in summary["task_counts"] and summary["task_counts"]["r__x-0"] == (1, 1)
    worse = summarize([*trials, _trial("s__y-1", 0, Outcome.GRADER_ERROR)], [1], 0)
    assert worse["headline"] is None and worse["scores"]["avg@1"]["value"] == 1.0
    assert summarize([_trial("r__x-1", 0, Outcome.INFRA_ERROR)], [1], 0)["scores"] == {}


def test_pass_at_k_is_unbiased() -> None:
    """Unbiased: its mean over all outcomes of four fair coins is 1 - (1 - p)^k."""
    mean = sum(comb(4, c) / 16 * pass_at_k(4, c, 2) for c in range(5))
    assert mean == pytest.approx(1 - 0.5**2)
