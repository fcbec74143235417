"""pass@k by hand, and intervals that behave."""

import pytest

from nanoswe_evalkit.passk import avg_at_k, paired_difference, pass_at_k, pass_estimate


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
    assert avg_at_k(counts) == average  # the same seed, the same interval


def test_interval_has_the_right_width() -> None:
    """100 tasks, half always and half never resolved: the mean has a standard error of 0.05."""
    counts = {str(i): (4, 4 * (i % 2)) for i in range(100)}
    estimate = avg_at_k(counts)
    assert estimate.low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.02)
    assert estimate.high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.02)


def test_pairing_removes_the_difference_between_tasks() -> None:
    a = {str(i): (1, i % 2) for i in range(100)}
    same = paired_difference(a, a)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    better = paired_difference(a, {task: (1, 1) for task in a})
    assert better.value == 0.5 and better.low > 0.38
