"""The algorithm on one page: trials with rewards in; which of them train, their advantages and per-
token weights, and the loss out.

All normalisation is decided here, once, on the controller, as a per-token weight over the whole
optimizer batch; workers only sum. Every policy term is anchored on the policy that sampled, so one
forward is enough and no correction is stacked on it. What a bound holds back, or what has no finite
behaviour logprob, stays in the denominators and is counted. Left out until something needs it: a
critic, proximal recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoswe_evalkit.outcome import Stop
from nanoswe_trainer.pack import Batch
from nanoswe_trainer.recipe import TrainSection

LOG_RATIO_CLAMP = 20.0
CUT_OFF = frozenset({Stop.MAX_TURNS, Stop.CONTEXT, Stop.TIMEOUT, Stop.STUCK})


def trusted_reward(stop: Stop | None, reward: float | None, truncated: str) -> float | None:
    """The reward this trial brings to its group; None: neither in the baseline nor trained.

    Where our machinery failed there is no reward (evalkit's `reward_of`).
    """
    if reward is None or stop is Stop.CANCELLED:
        return None
    if stop in CUT_OFF and truncated != "train":
        return 0.0 if truncated == "penalise" else None
    return reward


@dataclass(frozen=True)
class GroupAdvantages:
    """One number per trial of a group (None: not trained); why a whole group is left out."""

    values: tuple[float | None, ...]
    dropped: str = ""  # "", "too_few", "all_0", "all_1", "all_equal"


def group_advantages(rewards: Sequence[float | None], *, kind: str = "mean") -> GroupAdvantages:
    """reward minus the mean of the group's trusted rewards, over what `kind` says.

    A group with no difference between max and min teaches nothing and is dropped; so is one with
    fewer trusted rewards than half of it, or two. None moves no mean.
    """
    if kind == "teacher":  # each token has its own, in `policy_loss`; rewards are only looked at
        return GroupAdvantages(tuple(None if r is None else 0.0 for r in rewards))
    known = [r for r in rewards if r is not None]
    nothing: tuple[float | None, ...] = (None,) * len(rewards)
    n = len(known)
    if n < max(2, len(rewards) // 2):
        return GroupAdvantages(nothing, "too_few")
    if max(known) == min(known):
        name = {0.0: "all_0", 1.0: "all_1"}.get(known[0], "all_equal")
        return GroupAdvantages(nothing, name)
    mean = sum(known) / n
    squares = sum((r - mean) ** 2 for r in known)
    scale = {
        "mean": 1.0,
        "leave_one_out": (n - 1) / n,  # r minus the mean of the others
        "mean_std": (squares / n) ** 0.5,
        "mean_std_unbiased": (squares / (n - 1)) ** 0.5,
        "maxrl": mean,
    }[kind]
    return GroupAdvantages(tuple(None if r is None else (r - mean) / scale for r in rewards))


def token_weights(
    sampled_tokens: Sequence[int], normaliser: str, *,
    trials: Sequence[object], groups: Sequence[object], length: int,
) -> list[float]:  # fmt: skip
    """The weight of each sampled token of each trained sample, over the whole optimizer batch.

    token: 1 / all tokens. sequence, prompt: 1 / (trials x tokens of the trial), or of groups.
    constant (Dr. GRPO): 1 / (trials x `length`). `trials` and `groups` name each sample's own.
    """
    match normaliser:
        case "token":
            return [1.0 / sum(sampled_tokens)] * len(sampled_tokens)
        case "constant":
            return [1.0 / (len(set(trials)) * length)] * len(sampled_tokens)
    units = trials if normaliser == "sequence" else groups
    tokens = dict.fromkeys(units, 0)
    for unit, count in zip(units, sampled_tokens, strict=True):
        tokens[unit] += count
    return [1.0 / (len(tokens) * tokens[unit]) for unit in units]


def objective(
    logprobs_N: Tensor, log_ratio_N: Tensor, batch: Batch, train: TrainSection
) -> tuple[Tensor, Tensor, Tensor]:
    """What each token is worth, to be maximised; where the lower, and the upper bound held it.

    ratio: the current policy over the one that sampled; A: the advantage. clip: PPO, the lesser of
    ratio A and clipped ratio A. gspo: the same with the ratio of the row. reinforce, cispo: the
    clipped ratio weighs A log p, and has no gradient. ice: ratio A inside the bounds, nothing
    outside. dppo: ratio A until the token's probability has gone too far the way that A pushes it.
    """
    ratio = log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    low, high, advantage = 1.0 - train.clip_low, 1.0 + train.clip_high, batch.advantages_N
    match train.policy:
        case "clip" | "gspo":
            worth = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            return worth, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
        case "reinforce" | "cispo":
            low = low if train.policy == "cispo" else 0.0
            worth = ratio.clamp(low, high).detach() * logprobs_N * advantage
            return worth, ratio < low, ratio > high
        case "ice":
            below, above = ratio < low, ratio > high
        case "dppo":
            moved = logprobs_N.exp() - (logprobs_N - log_ratio_N).exp()
            below = (moved < -train.clip_low) & (advantage < 0)
            above = (moved > train.clip_high) & (advantage > 0)
    return torch.where(below | above, 0.0, ratio) * advantage, below, above


def row_mean(log_ratio_N: Tensor, valid_N: Tensor, owners_N: Tensor) -> Tensor:
    """The mean log-ratio of each token's row, where each token has the gradient of its own."""
    sums, counts = (
        torch.zeros_like(log_ratio_N).index_add(0, owners_N, x.to(log_ratio_N))[owners_N]
        for x in (log_ratio_N.detach(), valid_N)
    )
    return sums / counts.clamp(min=1) + (log_ratio_N - log_ratio_N.detach())


def policy_loss(
    logprobs_N: Tensor, batch: Batch, train: TrainSection
) -> tuple[Tensor, dict[str, float]]:
    """Minus the weighted sum of the objective, plus the pulls that the recipe asks for.

    The metrics are weighted sums as well, so they add up over micro-batches (`weights` sums to the
    share trained); a name in _max takes the largest.
    """
    valid = torch.isfinite(batch.behaviour_N)
    log_ratio = torch.where(valid, logprobs_N - torch.where(valid, batch.behaviour_N, 0.0), 0.0)
    weight = batch.weights_N * valid
    if train.advantage == "teacher":  # the gradient of the reverse KL of each token
        assert batch.reference_N is not None
        batch = replace(batch, advantages_N=(batch.reference_N - logprobs_N).detach())
    anchored = log_ratio
    if train.policy == "gspo":
        anchored = row_mean(log_ratio, valid, batch.owners_N)
    worth, below, above = objective(logprobs_N, anchored, batch, train)
    loss = -(weight * worth).sum()
    numbers = {}
    if train.drift:
        loss = loss + train.drift * (weight * log_ratio.square()).sum()
    if batch.reference_N is not None:
        away = batch.reference_N - logprobs_N
        kl = (weight * (away.exp() - 1 - away)).sum()  # k3
        loss, numbers["kl_reference"] = loss + train.kl * kl, kl.item()
    with torch.no_grad():
        ratio, gap = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp(), log_ratio.abs()
        numbers |= {
            "loss": loss.item(),
            "ratio_mean": (weight * ratio).sum().item(),
            "logprob_gap": (weight * gap).sum().item(),
            "logprob_gap_max": gap.max().item(),
            "kl_behaviour": (weight * (ratio - 1 - log_ratio)).sum().item(),
            "clip_fraction_low": (weight * below).sum().item(),
            "clip_fraction_high": (weight * above).sum().item(),
            "tokens_without_logprob": (~valid).sum().item(),
        }
    return loss, numbers
