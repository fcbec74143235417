"""The numbers practitioners watch, defined once: trials in, flat dicts of floats for metrics.jsonl
out.

Token-level numbers (loss, entropy, ratios, gaps) come from `algo` and `worker`; here are those of
whole trials.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanoswe_evalkit.passk import avg_at_k, counts_of, pass_estimate
from nanoswe_evalkit.trial import Trial
from nanoswe_proxy.trajectory import Trajectory
from nanoswe_trainer.data import GroupBatch


def rollout_metrics(trials: Sequence[Trial], batch: GroupBatch) -> dict[str, float]:
    """Of one RL step: rewards, how trials ended, and what the batch left out."""
    rewards = batch.rewards
    numbers: dict[str, float] = {
        "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "trials": len(trials),
        "trials_without_reward": len(trials) - len(rewards),
        "samples_trained": len(batch.rows),
        "turns_mean": sum(t.turns for t in trials) / max(len(trials), 1),
        **batch.counts,
    }
    ends = Counter(f"stop_{t.stop}" for t in trials if t.stop)
    ends.update(f"outcome_{t.outcome}" for t in trials)
    return numbers | dict(sorted(ends.items()))


def ages(trajectories: Iterable[Trajectory], version: int) -> dict[str, float]:
    """How many versions ago the oldest sampled token of each trajectory was sampled."""
    oldest = [
        version - min(v for s in t.samples for v, m in zip(s.versions, s.mask, strict=True) if m)
        for t in trajectories
        if any(any(s.mask) for s in t.samples)
    ]
    return {"age_mean": sum(oldest) / max(len(oldest), 1), "age_max": max(oldest, default=0)}


def alarms(step: Mapping[str, float]) -> dict[str, str]:
    """What a practitioner should look at, by name, in plain words, from an RL step's metrics."""
    trials, found = max(step["trials"], 1), {}
    groups = sum(n for name, n in step.items() if name.startswith("groups_"))
    if (lost := step["trials_without_reward"]) > 0.05 * trials:
        found["lost"] = f"{lost} of {trials} trials have no reward: our machinery fails, see trials"
    if groups and not step.get("trained_tokens"):
        found["equal"] = "no group had different rewards: the tasks are too hard, or too easy"
    if step.get("logprob_gap", 0) > 0.05 and not step["age_max"]:
        gap = step["logprob_gap"]
        found["gap"] = f"sampler and trainer differ by {gap:.2g} a token on the same weights"
    if (cut := step.get("stop_context", 0) + step.get("stop_max_turns", 0)) > 0.5 * trials:
        keys = "cluster.max_context, agent.max_turns"
        found["cut"] = f"{cut} of {trials} trials were cut off: {keys}"
    if step.get("skipped_updates"):
        found["skipped"] = "an update was skipped: its gradient was not finite"
    return found


def eval_metrics(trials: Sequence[Trial], attempts: int) -> dict[str, Any]:
    """avg@k and pass@k with 95 % intervals, k = the attempts at each task."""
    counts = counts_of(trials)
    average = avg_at_k(counts)
    full = pass_estimate(counts, attempts)
    return {
        "avg_at_k": average.value, "avg_low": average.low, "avg_high": average.high,
        "pass_at_k": full.value, "pass_low": full.low, "pass_high": full.high,
        "k": attempts, "tasks": average.tasks,
        "trials_without_reward": sum(t.reward is None for t in trials),
    }  # fmt: skip
