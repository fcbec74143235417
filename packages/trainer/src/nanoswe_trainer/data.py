"""Where training rows come from: nano demonstrations for SFT, sealed trajectories with their trials
for RL.

SFT rows are rendered by the proxy's renderer from the very messages that the `nano` agent would
exchange, so the tokens trained are those that would have been sampled. RL rows are the sampled
tokens themselves; nothing is ever decoded and encoded again. Refuses a trial whose trajectory is
missing: a reward without its tokens is a fault of ours.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nanoswe_evalkit.agents.nano import SYSTEM_PROMPT
from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.nano import BUGS, NanoCase, cases, fix_command
from nanoswe_proxy.render.types import Encoded
from nanoswe_proxy.trajectory import Provenance, Trajectory
from nanoswe_trainer.algo import group_advantages, token_weights, trusted_reward
from nanoswe_trainer.pack import Row
from nanoswe_trainer.recipe import TrainSection


def conversation(case: NanoCase, expression: str) -> list[dict]:
    """What an agent that repairs `case` with `expression` says and sees, as normal messages."""

    def call(command: str) -> dict:
        arguments = '{"command": "' + command + '"}'
        return {
            "role": "assistant",
            "content": "",
            "calls": [{"name": "bash", "arguments": arguments}],
        }

    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": case.issue + "\n"},
        call(f"cat {case.file_name}"),
        {"role": "tool", "content": case.file_text},
        call(fix_command(case, expression)),
        {"role": "tool", "content": "(no output)"},
        call("submit"),
    ]


def demonstrations(count: int, seed: int, wrong: Sequence[float]) -> Iterator[tuple[NanoCase, str]]:
    """Train cases, each with the repair shown for it.

    The bug kinds take turns through `wrong`: the chance that a kind's demonstrations show the
    tempting wrong repair. They are imperfect on purpose, as found data is: what RL is for.
    """
    chance = {bug.kind: wrong[i % len(wrong)] for i, bug in enumerate(BUGS)}
    rng = random.Random(f"demonstrations/{seed}")
    # seed + 1: the cases of seed 0 are the tasks that `convert nano` writes
    for case in cases("train", count, seed + 1):
        yield case, case.tempting if rng.random() < chance[case.kind] else case.good


def sft_rows(conversations: Sequence[list[Encoded]], context_weight: float) -> list[Row]:
    """One row each; sampled tokens weigh 1, the others `context_weight`; scaled to sum to 1."""
    raw = []
    for parts in conversations:
        kinds = "".join(part.provenance for part in parts)
        weights = [1.0 if kind == Provenance.SAMPLED else context_weight for kind in kinds]
        raw.append(([t for part in parts for t in part.ids], [0.0, *weights[1:]]))
    total = sum(sum(weights) for _, weights in raw)
    return [Row(tuple(ids), tuple(w / total for w in weights)) for ids, weights in raw]


@dataclass
class GroupBatch:
    """What one RL step trains on, and the counts that say what it left out."""

    rows: list[Row] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # every reward known, trained or not
    counts: dict[str, int] = field(default_factory=dict)


def rl_rows(
    groups: Sequence[Sequence[Trial]], trajectories: Mapping[str, Trajectory],
    train: TrainSection, max_length: int,
) -> GroupBatch:  # fmt: skip
    """Rows in (group, attempt) order: a batch is a function of its trials, not of arrival."""
    kinds = ("all_0", "all_1", "all_equal", "too_few")
    out = GroupBatch(counts={f"groups_{kind}": 0 for kind in kinds})
    chosen = []
    for number, group in enumerate(groups):
        out.rewards += [t.reward for t in group if t.reward is not None]
        trusted = [trusted_reward(t.stop, t.reward, train.truncated) for t in group]
        advantages = group_advantages(trusted, kind=train.advantage)
        if advantages.dropped:
            out.counts[f"groups_{advantages.dropped}"] += 1
        for trial, value in zip(group, advantages.values, strict=True):
            if value is not None:
                if trial.trial_id not in trajectories:
                    raise LookupError(f"trial {trial.trial_id} has a reward and no trajectory")
                sealed = trajectories[trial.trial_id]
                samples = [s for s in sealed.samples if any(s.mask)]
                chosen += [(s, value, trial.trial_id, number) for s in samples]
    if not chosen:
        return out
    rows, values, trials, numbers = zip(*chosen, strict=True)
    counts = [sum(sample.mask) for sample in rows]
    owners = {"trials": trials, "groups": numbers}
    weights = token_weights(counts, train.normaliser, length=max_length, **owners)
    for sample, value, weight in zip(rows, values, weights, strict=True):
        out.rows.append(Row(
            tokens=sample.tokens,
            weights=tuple(weight if m else 0.0 for m in sample.mask),
            advantages=(value,) * len(sample.tokens),
            behaviour=sample.logprobs,
        ))  # fmt: skip
    return out
