"""B8: policies of asynchronous sampling under lognormal latencies, simulated: steps an hour, the
greatest age, what is dropped, and whether short groups are preferred.

Eight groups of eight a step; a group ends with its slowest trial (lognormal, median 5 min, at most
60); a step takes 6 min; (S + 1) x 8 groups may be live. Policies other than ours as their projects
describe them: strict order; a window of the oldest (TitanRL, 30 %); completion order (SkyRL,
AReaL); completion order that drops what is older than S (prime-rl, TRL, NeMo-RL).

    python benchmarks/trainer/b8_scheduler.py --out benchmarks/trainer/b8.json
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from pathlib import Path

from nanoswe_trainer.sched import Schedule

PER_STEP, STEP_MIN = 8, 6.0


def latency(rng: random.Random, sigma: float) -> float:
    return max(min(60.0, 5.0 * rng.lognormvariate(0, sigma)) for _ in range(8))


class Peer:
    """Groups enter in completion order within a window; `drop` forgets what is too old."""

    def __init__(self, depth: int, window: float, drop: bool = False):
        self.depth, self.window, self.drop = depth, window, drop
        self.version, self.live, self.finished, self.batch = 0, {}, [], []
        self.dropped: list[int] = []

    @property
    def may_admit(self) -> bool:
        return len(self.live) < (self.depth + 1) * PER_STEP

    @property
    def full(self) -> bool:
        return len(self.batch) == PER_STEP

    def admit(self, group: int) -> None:
        self.live[group] = self.version

    def finish(self, group: int) -> None:
        self.finished.append(group)
        self._fill()

    def trained(self) -> None:
        for group in self.batch:
            del self.live[group]
        self.batch, self.version = [], self.version + 1
        if self.drop:
            for group in [g for g in self.live if self.version - self.live[g] > self.depth]:
                del self.live[group]
                self.dropped.append(group)
                self.finished = [g for g in self.finished if g != group]
        self._fill()

    def _fill(self) -> None:
        """A finished group enters if it is less than `window` behind the oldest that has not."""
        while not self.full:
            oldest = min((g for g in self.live if g not in self.batch), default=0)
            fit = [g for g in self.finished if g in self.live and g < oldest + self.window]
            if not fit:
                return
            self.batch.append(fit[0])
            self.finished.remove(fit[0])


def simulate(plan: Schedule | Peer, sigma: float, steps: int, seed: int) -> dict[str, float]:
    rng, now, following = random.Random(seed), 0.0, 0
    ends: list[tuple[float, int]] = []
    took, admitted, ages, trained, offered = {}, {}, [], [], []
    busy_until, idle, done = 0.0, 0.0, 0
    dead: set[int] = set()
    while done < steps:
        while plan.may_admit:
            plan.admit(following)
            took[following], admitted[following] = latency(rng, sigma), plan.version
            offered.append(took[following])
            heapq.heappush(ends, (now + took[following], following))
            following += 1
        if plan.full and now >= busy_until:
            ages += [plan.version - admitted[g] for g in plan.batch]
            trained += [took[g] for g in plan.batch]
            idle += now - busy_until
            busy_until = now + STEP_MIN
            while ends and ends[0][0] <= busy_until:  # sampling goes on during the step
                _, group = heapq.heappop(ends)
                if group in plan.live:
                    plan.finish(group)
            now = busy_until
            plan.trained()
            dead.update(getattr(plan, "dropped", ()))
            done += 1
            continue
        now, group = ends[0][0], heapq.heappop(ends)[1]
        if group in plan.live:
            plan.finish(group)
    mean = statistics.fmean
    return {
        "steps_per_hour": round(60 * done / now, 2), "trainer_idle": round(idle / now, 3),
        "age_max": max(ages), "age_mean": round(mean(ages), 2),
        "dropped": round(len(dead) / following, 3),
        "duration_trained_over_offered": round(mean(trained) / mean(offered[: len(trained)]), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for sigma in (0.7, 1.0):
        for depth, bound in ((2, 4), (4, 6), (4, 8)):
            policies = {
                "strict order": Peer(depth, 1),
                "window .3": Peer(depth, int(0.3 * (depth + 1) * PER_STEP)),
                "completion": Peer(depth, math.inf), "drop": Peer(depth, math.inf, True),
                f"deadline {bound}": Schedule(PER_STEP, depth, bound),
            }  # fmt: skip
            for name, plan in policies.items():
                numbers = simulate(plan, sigma, options.steps, 7)
                found.append({"sigma": sigma, "depth": depth, "policy": name, **numbers})
                sys.stdout.write(json.dumps(found[-1]) + "\n")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
