"""Advantages, weights, status rules and the loss, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoswe_evalkit.outcome import Outcome, Stop, reward_of
from nanoswe_trainer.algo import group_advantages, policy_loss, token_weights, trusted_reward
from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.model import Decoder, ModelConfig, initialise, packed_attention
from nanoswe_trainer.muon import Muon
from nanoswe_trainer.pack import Row, bins, pack
from nanoswe_trainer.recipe import TrainSection

PLAIN = TrainSection()


def test_advantages_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]).values == (0.5, -0.5, -0.5, 0.5)
    one_in_four = group_advantages([1.0, 0.0, 0.0, 0.0], kind="mean_std").values
    assert one_in_four == pytest.approx((math.sqrt(3), *[-1 / math.sqrt(3)] * 3))


def test_a_masked_member_does_not_move_the_baseline() -> None:
    assert group_advantages([1.0, None, 0.0, 0.0, 1.0]).values == (0.5, None, -0.5, -0.5, 0.5)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [([1.0, 1.0, 1.0], "all_1"), ([0.0, 0.0], "all_0"), ([0.5, 0.5], "all_equal"),
     ([1.0, None, None, None], "too_few"),
     ([None, None], "too_few")],
)  # fmt: skip
def test_groups_that_teach_nothing_are_dropped_by_name(
    rewards: list[float | None], why: str
) -> None:
    dropped = group_advantages(rewards)
    assert dropped.dropped == why
    assert set(dropped.values) == {None}


def test_half_of_a_group_is_enough_and_two_are_needed() -> None:
    assert group_advantages([0.0, 1.0, None, None]).values == (-0.5, 0.5, None, None)
    assert group_advantages([0.0, 1.0, *[None] * 4]).dropped == "too_few"


def test_shift_and_scale_laws() -> None:
    base = group_advantages([0.0, 1.0, 3.0]).values
    shifted = group_advantages([5.0, 6.0, 8.0]).values
    assert base == pytest.approx(shifted)
    assert group_advantages([0.0, 10.0, 30.0], kind="mean_std").values == pytest.approx(
        group_advantages([0.0, 1.0, 3.0], kind="mean_std").values
    )


def test_weights_by_hand() -> None:
    counts, units = [3, 5, 2], {"trials": "aab", "groups": "xxx", "length": 100}
    assert token_weights(counts, "token", **units) == [1 / 10] * 3
    assert token_weights(counts, "sequence", **units) == [1 / 16, 1 / 16, 1 / 4]
    assert token_weights(counts, "prompt", **units) == [1 / 10] * 3
    assert token_weights(counts, "prompt", **units | {"groups": "xyy"}) == [1 / 6, 1 / 14, 1 / 14]
    assert token_weights(counts, "constant", **units) == [1 / 200] * 3
    with pytest.raises(ValueError):
        token_weights(counts, "sequence", **units | {"trials": "aabc"})


def test_infrastructure_never_counts_as_a_zero() -> None:
    for outcome in Outcome:
        trusted = trusted_reward(Stop.FINISHED, reward_of(outcome), "mask")
        assert (trusted is None) == (outcome in (Outcome.INFRA_ERROR, Outcome.GRADER_ERROR))
    assert trusted_reward(Stop.CANCELLED, 1.0, "train") is None


@pytest.mark.parametrize("stop", [Stop.MAX_TURNS, Stop.CONTEXT, Stop.TIMEOUT, Stop.STUCK])
def test_cut_off_trials_follow_the_recipe(stop: Stop) -> None:
    got = [trusted_reward(stop, 1.0, t) for t in ("mask", "train", "penalise")]
    assert got == [None, 1.0, 0.0]


def row(
    tokens: list[int], trained: int, advantage: float, behaviour: list[float] | None = None
) -> Row:
    n = len(tokens)
    weights = [0.0] * (n - trained) + [1.0 / trained] * trained
    return Row(tuple(tokens), tuple(weights), (advantage,) * n, tuple(behaviour or [0.0] * n))


def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_reinforce(small: Decoder) -> None:
    plain = row([1, 2, 3, 4, 5], 3, 0.7)
    scored, _ = token_logprobs(small, pack([plain]))
    on_policy = row([1, 2, 3, 4, 5], 3, 0.7, [0.0, 0.0, *scored.tolist()])
    batch = pack([on_policy])
    logprobs, _ = token_logprobs(small, batch)
    loss, numbers = policy_loss(logprobs, batch, PLAIN)
    assert numbers["ratio_mean"] == pytest.approx(1.0, abs=1e-7)
    assert numbers["logprob_gap"] == numbers["kl_behaviour"] == 0.0
    assert numbers["clip_fraction_low"] == numbers["clip_fraction_high"] == 0.0
    gradient = torch.autograd.grad(loss, small.lm_head.weight, retain_graph=True)[0]
    reinforce = -(batch.weights_N * batch.advantages_N * logprobs).sum()
    assert torch.allclose(
        gradient, torch.autograd.grad(reinforce, small.lm_head.weight)[0], atol=1e-7
    )


def test_clip_by_hand() -> None:
    batch = pack([row([1, 2, 3], 2, 1.0, [0.0, -1.0, -1.0])])
    logprobs = torch.tensor([-1.0 + math.log(2.0), -1.0 + math.log(0.5)], requires_grad=True)
    loss, numbers = policy_loss(logprobs, batch, PLAIN)
    assert loss.item() == pytest.approx(-(0.5 * 1.28 + 0.5 * 0.5))
    assert numbers["clip_fraction_high"] == 0.5
    assert numbers["clip_fraction_low"] == 0.0
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.25])


def test_tokens_without_weight_may_hold_anything(small: Decoder) -> None:
    clean = row([1, 2, 3, 4], 2, 1.0, [0.0, 0.0, -1.0, -2.0])
    dirty = Row(
        clean.tokens,
        clean.weights,
        (math.nan, math.inf, 1.0, 1.0),
        (math.nan, -math.inf, -1.0, -2.0),
    )
    losses = []
    for sample in (clean, dirty):
        batch = pack([sample])
        losses.append(policy_loss(token_logprobs(small, batch)[0], batch, PLAIN)[0].item())
    assert losses[0] == losses[1]


def test_splitting_into_micro_batches_changes_nothing(small: Decoder) -> None:
    rows = [row(list(range(1, n)), 2, 0.3 * n, [-1.0] * (n - 1)) for n in (5, 9, 4, 12)]

    def gradient(max_tokens: int) -> torch.Tensor:
        small.zero_grad()
        for part in bins(rows, max_tokens):
            batch = pack(part)
            policy_loss(token_logprobs(small, batch)[0], batch, PLAIN)[0].backward()
        assert small.lm_head.weight.grad is not None
        return small.lm_head.weight.grad.clone()

    whole = gradient(1000)
    for max_tokens in (1, 10, 20):
        assert torch.allclose(whole, gradient(max_tokens), rtol=1e-4, atol=1e-6)


def test_entropy_and_logprobs_by_hand(small: Decoder) -> None:
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.zero_()
    logprobs, entropy = token_logprobs(small, pack([row([1, 2, 3], 2, 0.0)]))
    assert logprobs.tolist() == pytest.approx([-math.log(50)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(50)] * 2)


@pytest.mark.parametrize(
    "make",
    [lambda: Row((), ()), lambda: Row((1, 2), (0.5, 0.5)), lambda: Row((1, 2), (0.0,)),
     lambda: Row((1, 2), (0.0, 1.0), advantages=(1.0,))],
)  # fmt: skip
def test_malformed_rows_are_refused(make) -> None:
    with pytest.raises(ValueError):
        make()


def test_muon_steps_along_the_nearest_orthogonal_matrix() -> None:
    torch.manual_seed(0)
    shapes = [(12, 12), (24, 12), (12, 24), (12, 12)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    before = [p.detach().clone() for p in ours]
    optimizers = Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step == 0:
            for mine, start in zip(ours, before, strict=True):
                rows, columns = mine.shape
                moved = (start - mine.detach()) / (0.02 * max(1.0, rows / columns) ** 0.5)
                assert torch.linalg.svdvals(moved).sub(0.95).abs().max() < 0.3
    # torch's iterates in bfloat16, with three decimal digits
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).abs().max() < 3 * 0.02 * 0.02


@pytest.mark.parametrize("chunk", [1, 3, 4096])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_head_in_chunks_is_the_plain_head(
    small: Decoder, monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    batch = pack([row(list(range(n)), n - 1, 0.0) for n in (4, 9, 2)])
    hidden = small(batch.ids_T, batch.positions_T, packed_attention(batch.lengths))
    every = torch.log_softmax(small.head(hidden[batch.predictors_N]) / temperature, -1)
    plain = every.gather(1, batch.targets_N[:, None])[:, 0]
    monkeypatch.setattr("nanoswe_trainer.logprob.CHUNK", chunk)
    chunked, entropy = token_logprobs(small, batch, temperature=temperature)
    assert torch.allclose(plain, chunked, atol=1e-6)
    assert torch.allclose(entropy, -(every.exp() * every).sum(-1), atol=1e-5)
    parameters = list(small.parameters())
    weights = torch.linspace(-1, 1, len(plain))
    want, got = (torch.autograd.grad((weights * x).sum(), parameters) for x in (plain, chunked))
    for a, b in zip(want, got, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@given(order=st.permutations(range(4)), max_tokens=st.integers(1, 40))
def test_any_bins_in_any_order_give_the_same_loss(order: list[int], max_tokens: int) -> None:
    config = ModelConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    decoder = initialise(config, 3)
    for train in (PLAIN, TrainSection(preset="gspo", clip_low=0.2, clip_high=0.2)):
        rows = [
            row(list(range(1, n)), 3, 0.3 * n - 2, [-2.5 - n / 9] * (n - 1)) for n in (5, 9, 6, 12)
        ]
        results = []
        for parts in ([rows], bins([rows[i] for i in order], max_tokens)):
            decoder.zero_grad()
            losses = []
            for part in parts:
                batch = pack(part)
                loss, _ = policy_loss(token_logprobs(decoder, batch)[0], batch, train)
                loss.backward()
                losses.append(loss.item())
            results.append((sum(losses), decoder.lm_head.weight.grad.clone()))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-6)
        assert torch.allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)
