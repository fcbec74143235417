"""Rows into batches, micro-batches and ranks, by hand."""

import pytest

from nanoswe_trainer.pack import ATTENTION_TOKENS, Row, bins, pack, spread


def rows(*lengths: int) -> list[Row]:
    return [Row((7,) * n, (0.0,) * n) for n in lengths]


def sizes(parts: list[list[Row]]) -> list[list[int]]:
    return [[len(row.tokens) for row in part] for part in parts]


def test_a_batch_by_hand() -> None:
    first = Row((5, 6, 7), (0.0, 0.0, 0.25), (1.0, 2.0, 3.0), (0.0, 0.0, -0.5))
    batch = pack([first, Row((8, 9), (0.0, 0.75))])
    assert batch.ids_T.tolist() == [5, 6, 7, 8, 9] and batch.lengths == [3, 2]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert batch.predictors_N.tolist() == [1, 3] and batch.targets_N.tolist() == [7, 9]
    assert batch.weights_N.tolist() == [0.25, 0.75] and batch.owners_N.tolist() == [0, 1]
    assert batch.advantages_N.tolist() == [3.0, 0.0] and batch.behaviour_N.tolist() == [-0.5, 0.0]


def test_bins_are_full_to_the_last_token_and_a_longer_row_stands_alone() -> None:
    assert sizes(bins(rows(4, 6, 1, 11, 2, 3), 10)) == [[4, 6], [1], [11], [2, 3]]
    assert bins([], 10) == []


def test_ranks_get_equal_work_in_order() -> None:
    lengths = (5, 1, 4, 2, 3)
    assert sizes(spread(rows(*lengths), 1)) == [[*lengths]]
    assert sizes(spread(rows(*lengths), 2)) == [[5, 2], [1, 4, 3]]
    assert sizes(spread(rows(9), 2)) == [[9], []]


def test_attention_counts_as_work() -> None:
    """At ATTENTION_TOKENS a token costs twice: one such row against as many tokens in short ones,
    and against twice as many.
    """
    long, short = ATTENTION_TOKENS, ATTENTION_TOKENS // 100
    found = spread(rows(long, *[short] * 198), 2)
    assert [len(part) for part in found] == [1, 198]
    assert [len(part) for part in spread(rows(long, *[short] * 100), 2)] == [1, 100]


def test_what_is_refused_is_named() -> None:
    with pytest.raises(ValueError, match="2 tokens has 1 weights"):
        Row((1, 2), (0.0,))
    with pytest.raises(ValueError, match="0 tokens"):
        Row((), ())
    with pytest.raises(ValueError, match="nothing predicts it"):
        Row((1,), (1.0,))
    for name in ("advantages", "behaviour"):
        with pytest.raises(ValueError, match=f"{name} has 1 entries, not 2"):
            Row((1, 2), (0.0, 1.0), **{name: (0.0,)})
