"""Alarms: what is not as it should be is said in plain words, and nothing else is."""

import pytest

from nanoswe_trainer.metrics import alarms

FINE = {
    "trials": 32, "trials_without_reward": 1, "age_max": 0, "trained_tokens": 900,
    "groups_all_0": 1, "groups_all_1": 1, "logprob_gap": 1e-6, "stop_context": 3,
    "skipped_updates": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, ""),
        ({"age_max": 2, "logprob_gap": 0.4}, ""),  # older weights: a difference is expected
        ({"trials_without_reward": 2}, "2 of 32 trials have no reward"),
        ({"trained_tokens": 0}, "no group had different rewards"),
        ({"logprob_gap": 0.2}, "sampler and trainer differ by 0.2 a token"),
        ({"stop_max_turns": 20}, "23 of 32 trials were cut off"),
        ({"skipped_updates": 1}, "an update was skipped"),
    ],
)
def test_alarms(change: dict, said: str) -> None:
    found = list(alarms(FINE | change).values())
    assert len(found) == bool(said) and all(text.startswith(said) for text in found)
