"""The algorithm on one page: trials with rewards in; which of them train, their advantages and per-
token weights out.

All normalisation is decided here, once, on the controller, as a per-token weight (trainer design:
group-relative advantages, a global token count). Workers only sum. `clip_loss` is the one policy
term: PPO's clip with separate bounds, anchored on the policy that sampled. Left out until something
needs it: a critic, a KL model, proximal recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from nanoswe_evalkit.outcome import Outcome, Stop
from nanoswe_trainer.pack import Batch

LOG_RATIO_CLAMP = 20.0


class Truncated(StrEnum):
    """What becomes of a trial that a limit cut off."""

    MASK = "mask"  # neither in the baseline nor trained
    TRAIN = "train"  # as if the agent had finished
    PENALISE = "penalise"  # trained with reward 0, whatever the verdict


CUT_OFF = frozenset({Stop.MAX_TURNS, Stop.CONTEXT, Stop.TIMEOUT, Stop.STUCK})


def trusted_reward(
    stop: Stop | None, outcome: Outcome, reward: float | None, truncated: Truncated
) -> float | None:
    """The reward this trial brings to its group; None: neither in the baseline nor trained."""
    if (
        reward is None
        or outcome in (Outcome.INFRA_ERROR, Outcome.GRADER_ERROR)
        or stop is Stop.CANCELLED
    ):
        return None
    if stop in CUT_OFF and truncated is not Truncated.TRAIN:
        return 0.0 if truncated is Truncated.PENALISE else None
    return reward


@dataclass(frozen=True)
class GroupAdvantages:
    """One number per trial of a group (None: not trained); why a whole group is left out."""

    values: tuple[float | None, ...]
    dropped: str = ""  # "", "too_few", "all_0", "all_1", "all_equal"


def group_advantages(
    rewards: Sequence[float | None], *, kind: str = "mean", min_group: int | None = None
) -> GroupAdvantages:
    """reward minus the group's mean ("mean"), or that over the population deviation ("mean_std").

    A group with no difference between max and min teaches nothing and is dropped; so is one with
    fewer than `min_group` (default: half of it, at least two) trusted rewards.
    """
    known = [r for r in rewards if r is not None]
    nothing: tuple[float | None, ...] = (None,) * len(rewards)
    if len(known) < (min_group or max(2, len(rewards) // 2)):
        return GroupAdvantages(nothing, "too_few")
    if max(known) == min(known):
        name = {0.0: "all_0", 1.0: "all_1"}.get(known[0], "all_equal")
        return GroupAdvantages(nothing, name)
    mean = sum(known) / len(known)
    scale = 1.0
    if kind == "mean_std":
        scale = (sum((r - mean) ** 2 for r in known) / len(known)) ** 0.5
    elif kind != "mean":
        raise ValueError(f"unknown advantage {kind!r}: mean or mean_std")
    return GroupAdvantages(tuple(None if r is None else (r - mean) / scale for r in rewards))


def token_weights(sampled_tokens: Sequence[int], normaliser: str, length: int = 0) -> list[float]:
    """The weight of each sampled token of each trained sample, over the whole optimizer batch.

    token: 1 / all tokens. sequence: 1 / (samples x own tokens). constant (Dr. GRPO): 1 / (samples x
    `length`).
    """
    total = sum(sampled_tokens)
    match normaliser:
        case "token":
            return [1.0 / total for _ in sampled_tokens]
        case "sequence":
            return [1.0 / (len(sampled_tokens) * n) if n else 0.0 for n in sampled_tokens]
        case "constant":
            return [1.0 / (len(sampled_tokens) * length) for _ in sampled_tokens]
    raise ValueError(f"unknown normaliser {normaliser!r}: token, sequence or constant")


def clip_loss(
    logprobs_N: Tensor, batch: Batch, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, float]]:
    """Minus the weighted sum of min(ratio A, clip(ratio) A), ratio = current policy over the one
    that sampled.

    The metrics are weighted sums as well, so they add up over micro-batches (`weights` sums to the
    share trained).
    """
    valid = torch.isfinite(batch.behaviour_N)
    log_ratio = torch.where(valid, logprobs_N - torch.where(valid, batch.behaviour_N, 0.0), 0.0)
    ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    weight, advantage = batch.weights_N * valid, batch.advantages_N
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
    with torch.no_grad():
        gap = log_ratio.abs()
        low = (ratio < 1.0 - clip_low) & (advantage < 0)
        high = (ratio > 1.0 + clip_high) & (advantage > 0)
        numbers = {
            "loss": loss.item(),
            "ratio_mean": (weight * ratio).sum().item(),
            "logprob_gap": (weight * gap).sum().item(),
            "kl_behaviour": (weight * (ratio - 1 - log_ratio)).sum().item(),
            "clip_fraction_low": (weight * low).sum().item(),
            "clip_fraction_high": (weight * high).sum().item(),
        }
    return loss, numbers
