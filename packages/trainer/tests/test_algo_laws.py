"""Laws of the algorithm over random numbers: every preset's gradient against finite differences,
what advantages and weights may not depend on, and that the defaults are what they were.
"""

import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.recipe import load_recipe
from nanoswe_trainer.algo import group_advantages, objective, policy_loss, token_weights
from nanoswe_trainer.model import Decoder, load_decoder
from nanoswe_trainer.pack import Batch, Row, pack
from nanoswe_trainer.recipe import PRESETS, TrainRecipe, TrainSection
from nanoswe_trainer.worker import Worker

*KINDS, TEACHER = get_args(TrainSection.model_fields["advantage"].annotation)
NORMALISERS = get_args(TrainSection.model_fields["normaliser"].annotation)
POLICIES = get_args(TrainSection.model_fields["policy"].annotation)
rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]) | st.none(), min_size=2, max_size=9)


def random_batch(seed: int, gap: float, rows: int = 4, dtype: torch.dtype = torch.float64) -> Batch:
    """Rows with weights and an advantage of their own; behaviour logprobs `gap` away from -2."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(rows):
        n = 2 + (seed + number) % 5
        drift = torch.randn(n, generator=generator) * gap
        advantage = float(torch.randn((), generator=generator))
        drawn.append(Row(
            tuple(range(n)), (0.0, *[0.5 / n] * (n - 1)), (advantage,) * n,
            tuple((-2 + drift).tolist()),
        ))  # fmt: skip
    batch = pack(drawn)
    wide = {
        f.name: value.to(dtype)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and value.is_floating_point()
    }
    return replace(batch, **wide)


def at(batch: Batch, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    noise = torch.randn(len(batch.targets_N), generator=generator, dtype=torch.float64)
    return (-2 + 0.3 * noise).requires_grad_()


def differences(function, x: Tensor, step: float = 1e-6) -> Tensor:
    """The gradient without autograd."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        for i in range(len(x)):
            for sign in (1, -1):
                moved = x.clone()
                moved[i] += sign * step
                out[i] += sign * function(moved) / (2 * step)
    return out


TAUGHT = {"preset": "distill", "teacher": "t"}
VARIANTS = [{"preset": name} for name in PRESETS if name != "distill"] + [
    {"policy": "ice", "clip_low": 0.5, "clip_high": 4.0},
    {"policy": "gspo", "clip_low": 0.2, "drift": 0.1},
    {"kl": 0.1},
    {"kl": 0.1, "drift": 0.01},
]


@pytest.mark.parametrize("train", VARIANTS, ids=str)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_gradients_are_those_of_finite_differences(train: dict, seed: int) -> None:
    chosen = TrainSection(**train)
    batch = random_batch(seed, gap=0.6)
    if chosen.kl:
        batch = replace(batch, reference_N=batch.behaviour_N - 0.3)
    logprobs = at(batch, seed)
    policy_loss(logprobs, batch, chosen)[0].backward()
    assert logprobs.grad is not None

    def surrogate(x: Tensor) -> float:
        """The loss, where the ratio that only weighs stays as it was."""
        if chosen.policy not in ("reinforce", "cispo"):
            return policy_loss(x, batch, chosen)[0].item()
        worth, _, _ = objective(
            logprobs.detach(), logprobs.detach() - batch.behaviour_N, batch, chosen
        )
        return -(batch.weights_N * worth / logprobs.detach() * x).sum().item()

    want = differences(surrogate, logprobs.detach())
    assert torch.allclose(logprobs.grad, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 10**6))
def test_on_policy_every_term_is_reinforce(policy: str, seed: int) -> None:
    batch = random_batch(seed, gap=1.0)
    logprobs = batch.behaviour_N.clone().requires_grad_()
    loss, numbers = policy_loss(logprobs, batch, TrainSection(policy=policy))
    loss.backward()
    assert torch.allclose(logprobs.grad, -batch.weights_N * batch.advantages_N, rtol=1e-12)
    assert numbers["ratio_mean"] == pytest.approx(batch.weights_N.sum().item(), abs=1e-12)
    assert numbers["logprob_gap_max"] == numbers["kl_behaviour"] == 0
    assert numbers["clip_fraction_low"] == numbers["clip_fraction_high"] == 0


def before_presets(logprobs_N: Tensor, batch: Batch, low: float, high: float) -> Tensor:
    """The loss of the first release, as it was written."""
    valid = torch.isfinite(batch.behaviour_N)
    log_ratio = torch.where(valid, logprobs_N - torch.where(valid, batch.behaviour_N, 0.0), 0.0)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    weight, advantage = batch.weights_N * valid, batch.advantages_N
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    return -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()


@given(seed=st.integers(0, 10**6))
def test_the_defaults_have_not_moved_by_a_bit(seed: int) -> None:
    batch = random_batch(seed, gap=0.5, dtype=torch.float32)
    runs = []
    for loss in (
        lambda x: policy_loss(x, batch, TrainSection(advantage="mean_std"))[0],
        lambda x: before_presets(x, batch, 0.2, 0.28),
    ):
        logprobs = at(batch, seed).detach().float().requires_grad_()
        value = loss(logprobs)
        value.backward()
        runs.append((value, logprobs.grad))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_a_token_without_a_logprob_is_dropped_and_counted(policy: str, hole: float) -> None:
    batch = random_batch(5, gap=0.5)
    behaviour, weights = batch.behaviour_N.clone(), batch.weights_N.clone()
    behaviour[2], weights[2] = hole, 0.0
    train = TrainSection(policy=policy, drift=0.01)
    results = []
    for b in (replace(batch, behaviour_N=behaviour), replace(batch, weights_N=weights)):
        logprobs = at(batch, 5)
        loss, numbers = policy_loss(logprobs, b, train)
        loss.backward()
        results.append((loss, logprobs.grad, numbers))
    (holed, holed_gradient, numbers), (unweighted, gradient, _) = results
    assert holed_gradient is not None and torch.isfinite(holed_gradient).all()
    assert holed_gradient[2] == 0
    assert all(math.isfinite(value) for value in numbers.values())
    assert numbers["tokens_without_logprob"] == 1
    if policy != "gspo":  # there, the token also leaves the mean of its row
        assert torch.equal(holed_gradient, gradient) and torch.equal(holed, unweighted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gap", [1e3, -1e3])
def test_a_huge_ratio_gives_finite_numbers(policy: str, gap: float) -> None:
    batch = random_batch(6, gap=0.1)
    logprobs = (batch.behaviour_N + gap).requires_grad_()
    loss, numbers = policy_loss(logprobs, batch, TrainSection(policy=policy))
    loss.backward()
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value in numbers.values())


def one(policy: dict, behaviour: float, now: float, advantage: float) -> tuple[float, float]:
    """Loss and gradient of a single token of weight 1."""
    batch = pack([Row((1, 2), (0.0, 1.0), (advantage,) * 2, (0.0, behaviour))])
    logprobs = torch.tensor([now], requires_grad=True)
    loss, _ = policy_loss(logprobs, batch, TrainSection(**policy))
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


def test_terms_by_hand() -> None:
    up, down = math.log(2.0), math.log(0.5)
    # cispo: the ratio 2 is capped at 1.5 and weighs A log p
    cispo = {"policy": "cispo", "clip_low": 1.0, "clip_high": 0.5}
    assert one(cispo, -1, -1 + up, 3.0) == pytest.approx((-1.5 * 3 * (up - 1), -4.5))
    # reinforce: no lower bound
    assert one({"policy": "reinforce"}, -1, -1 + down, 1.0)[1] == pytest.approx(-0.5)
    # ice: outside of [0.8, 1.28] nothing, inside ratio x A
    assert one({"policy": "ice"}, -1, -1 + up, -1.0) == (0.0, 0.0)
    assert one({"policy": "ice"}, -1, -1 + math.log(0.9), 2.0) == pytest.approx((-1.8, -1.8))
    # dppo: a rare token may double, a likely one may not; the other way is always open
    dppo = {"policy": "dppo", "clip_low": 0.2, "clip_high": 0.2}
    assert one(dppo, math.log(0.01), math.log(0.02), 1.0)[1] == pytest.approx(-2.0)
    assert one(dppo, math.log(0.4), math.log(0.8), 1.0)[1] == 0.0
    assert one(dppo, math.log(0.4), math.log(0.8), -1.0)[1] == pytest.approx(2.0)
    assert one({"policy": "clip"}, -3, -3 + math.log(8), -1.0) == pytest.approx((8.0, 8.0))


@pytest.mark.parametrize("policy", ["clip", "cispo", "reinforce", "ice"])
def test_which_bound_held_a_token(policy: str) -> None:
    """Who is on a bound is free; clip holds only whom the advantage pushes further out."""
    train = TrainSection(policy=policy, clip_low=0.5, clip_high=1.0)
    ratios = torch.tensor([0.5, 2.0, 0.4, 2.1]).repeat_interleave(3)
    batch = replace(pack([Row(tuple(range(13)), (0.0,) * 13, (0.0,) * 13, (0.0,) * 13)]),
                    advantages_N=torch.tensor([-0.5, 0.0, 0.5] * 4))  # fmt: skip
    assert ratios.log().exp()[:6].tolist() == ratios[:6].tolist()
    _, below, above = objective(torch.full((12,), -2.0), ratios.log(), batch, train)
    held = [[6], [11]] if policy == "clip" else [[6, 7, 8], [9, 10, 11]]
    if policy == "reinforce":  # it has no lower bound
        held[0] = []
    assert [side.nonzero().flatten().tolist() for side in (below, above)] == held


@pytest.mark.parametrize("kind", KINDS)
@given(rewards=rewards, order=st.randoms())
def test_laws_of_advantages(kind: str, rewards: list[float | None], order) -> None:
    got = group_advantages(rewards, kind=kind)
    known = [r for r in rewards if r is not None]
    shuffled = list(range(len(rewards)))
    order.shuffle(shuffled)
    permuted = group_advantages([rewards[i] for i in shuffled], kind=kind)
    again = group_advantages([*rewards, None], kind=kind)  # a masked member more
    if got.dropped:
        assert set(got.values) == {None} and permuted.dropped == got.dropped
        assert len(known) < max(2, len(rewards) // 2) or len(set(known)) == 1
        return
    near = pytest.approx
    assert list(permuted.values) == near([got.values[i] for i in shuffled])
    assert again.dropped == "too_few" or list(again.values[:-1]) == near(list(got.values))
    values = [v for v in got.values if v is not None]
    assert sum(values) == near(0, abs=1e-9)
    assert [v is None for v in got.values] == [r is None for r in rewards]
    scaled = group_advantages([r and r * 4 for r in rewards], kind=kind).values
    scale = 4 if kind in ("mean", "leave_one_out") else 1
    assert list(scaled) == near([v and v * scale for v in got.values])
    if kind != "maxrl":
        shifted = group_advantages([r if r is None else r + 7 for r in rewards], kind=kind).values
        assert list(shifted) == near(list(got.values))


def test_kinds_of_advantage_by_hand() -> None:
    four = [1.0, 0.0, 0.0, 0.0]
    assert group_advantages(four, kind="leave_one_out").values == pytest.approx((1, *[-1 / 3] * 3))
    assert group_advantages(four, kind="mean_std_unbiased").values == pytest.approx(
        (1.5, -0.5, -0.5, -0.5)
    )
    assert group_advantages(four, kind="maxrl").values == pytest.approx((3, -1, -1, -1))
    assert group_advantages([1.0, None, None, None]).dropped == "too_few"
    assert group_advantages([1.0]).dropped == "too_few"


@pytest.mark.parametrize("normaliser", NORMALISERS)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), min_size=1, max_size=12))
def test_weights_sum_to_the_stated_constant(normaliser, sizes: list[tuple[int, int]]) -> None:
    counts, groups = [n for n, _ in sizes], [g for _, g in sizes]
    trials = [i // 2 for i in range(len(counts))]  # two samples each
    weights = token_weights(counts, normaliser, trials=trials, groups=groups, length=100)
    total = sum(w * n for w, n in zip(weights, counts, strict=True))
    want = sum(counts) / (len(set(trials)) * 100) if normaliser == "constant" else 1.0
    assert total == pytest.approx(want)


def recipe(folder: Path, *overrides: str, **train: object) -> TrainRecipe:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({"name": "t", "tasks": {"path": "x"}, "train": train}))
    return load_recipe(file, overrides, TrainRecipe)


def test_a_preset_gives_values_and_the_recipe_wins(tmp_path: Path) -> None:
    assert tuple(PRESETS) == get_args(TrainSection.model_fields["preset"].annotation)[1:]
    dapo = recipe(tmp_path, "train.clip_high=0.5", preset="dapo", truncated="train").train
    assert (dapo.advantage, dapo.clip_low, dapo.clip_high) == ("mean_std", 0.2, 0.5)
    assert dapo.truncated == "train"
    for name, values in PRESETS.items():
        given = {"teacher": "t"} if name == "distill" else {}
        resolved = recipe(tmp_path, preset=name, **given).train.model_dump(mode="json")
        assert values.items() <= resolved.items()
        assert recipe(tmp_path, **resolved).train.model_dump(mode="json") == resolved


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"preset": "ppo"}, r"train.preset: Input should be '', 'grpo'"),
        ({"preset": ["grpo"]}, "train.preset"),
        ({"preset": "distill"}, "train: .*teacher needs train.teacher"),
        ({"teacher": "t"}, "train: .*teacher needs train.teacher"),
        ({**TAUGHT, "kl": 0.1}, "train: .*kl must be 0"),
        ({"clip_hi": 0.3}, "unknown key train.clip_hi; did you mean clip_high"),
        ({"kl": -1}, "train.kl"),
        ({"advantage": "gae"}, "train.advantage"),
    ],
)
def test_wrong_settings_are_one_line(tmp_path: Path, train: dict, says: str) -> None:
    with pytest.raises(EvalkitError, match=says) as error:
        recipe(tmp_path, **train)
    assert "\n" not in str(error.value)


def test_rl_on_greedy_trials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvalkitError, match=r"model\.temperature above 0"):
        recipe(tmp_path, "model.temperature=0", "train.steps=1")
    assert recipe(tmp_path, "model.temperature=0").model.temperature == 0


def test_the_pull_to_the_reference_is_zero_at_it_and_grows_away_from_it(
    small: Decoder, tmp_path: Path
) -> None:
    row = Row((1, 2, 3, 4), (0.0, 0.5, 0.0, 0.5), (1.0,) * 4, (-4.0,) * 4)
    train = TrainSection(kl=0.5)
    worker = Worker(small)
    worker.export(tmp_path)
    worker.begin(learning_rate=1e-2, reference=tmp_path)
    loss = partial(policy_loss, train=train)
    first, second = (worker.step([row], loss) for _ in range(2))
    assert first["kl_reference"] == 0 < second["kl_reference"]
    free = Worker(load_decoder(tmp_path))
    free.begin(learning_rate=1e-2)
    assert free.step([row], partial(policy_loss, train=TrainSection()))["loss"] == first["loss"]


def test_distillation_descends_the_reverse_kl() -> None:
    """Over all tokens of a small vocabulary, each as often as it is sampled: its gradient."""
    generator = torch.Generator().manual_seed(5)
    student, teacher = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    logprobs, other = student.log_softmax(0), teacher.log_softmax(0)
    (want,) = torch.autograd.grad((logprobs.exp() * (logprobs - other)).sum(), student)
    batch = replace(
        random_batch(0, gap=0.0), weights_N=logprobs.detach().exp(),
        behaviour_N=logprobs.detach(), reference_N=other, advantages_N=torch.zeros(7),
    )  # fmt: skip
    logprobs = student.log_softmax(0)
    loss, numbers = policy_loss(logprobs, batch, TrainSection(**TAUGHT))
    (got,) = torch.autograd.grad(loss, student)
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    assert numbers["kl_reference"] > 0
    assert group_advantages([1.0, 1.0, None], kind=TEACHER).values == (0.0, 0.0, None)


def test_one_update_a_batch_makes_decoupled_ppo_the_reinforce_term() -> None:
    """The proximal policy is then the present one: its ratio is 1, unclipped, and what is left is
    the truncated importance weight on the gradient of log p (AReaL's loss, TIS at 2).
    """
    batch = random_batch(4, gap=0.8)
    logprobs = at(batch, 4)
    tis = (logprobs.detach() - batch.behaviour_N).exp().clamp(max=2.0)
    ratio = (logprobs - logprobs.detach()).exp()
    clipped = torch.minimum(ratio * batch.advantages_N, ratio.clamp(0.8, 1.2) * batch.advantages_N)
    (want,) = torch.autograd.grad(-(batch.weights_N * tis * clipped).sum(), logprobs)
    train = TrainSection(policy="reinforce", clip_high=1.0)
    (got,) = torch.autograd.grad(policy_loss(logprobs, batch, train)[0], logprobs)
    assert torch.allclose(got, want, rtol=1e-12)


def test_without_a_learning_rate_nothing_moves(small: Decoder) -> None:
    """open-instruct#1473: a gap that grows while nothing is learned is a fault of ours."""
    row = Row((1, 2, 3, 4), (0.0, 0.5, 0.0, 0.5), (1.0,) * 4, (-4.0,) * 4)
    worker = Worker(small)
    worker.begin(learning_rate=0.0)
    loss = partial(policy_loss, train=TrainSection())
    first, *rest = [worker.step([row], loss) for _ in range(4)]
    assert rest == [first] * 3 and first["grad_norm"] > 0
