"""Certificates: the gold patch scored 1 and no patch 0, each of N times, in one kind of sandbox.

In: a recipe whose agent is the oracle. Out: certificates.jsonl beside the tasks, a line per task
with every outcome, and by name the tests whose labels are wrong and those that are flaky. A task
with a line of this harness, content and sandbox, and of as many times, is not run again. Refuses
what `run_trials` refuses; a trial without a reward certifies nothing, and is not kept.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from nanoswe_evalkit.agents.base import NopAgent
from nanoswe_evalkit.outcome import EvalkitError, Outcome
from nanoswe_evalkit.place import local_trials
from nanoswe_evalkit.recipe import Recipe
from nanoswe_evalkit.records import appending, read_jsonl
from nanoswe_evalkit.runner import Gate, Run, content_key, run_trials
from nanoswe_evalkit.tracker import progress
from nanoswe_evalkit.trial import Trial
from nanoswe_harbor.task import Task, load_tasks

SCHEMA, CERTIFICATES = "certificate/1", "certificates.jsonl"


@dataclass(frozen=True)
class Certificate:
    """`gold` and `nothing` are the outcomes with the gold patch and with none."""

    task_id: str
    key: str
    sandbox: str
    gold: tuple[str, ...]
    nothing: tuple[str, ...]
    wrong_labels: tuple[str, ...]
    flaky_tests: tuple[str, ...]
    why: str = ""
    schema: str = SCHEMA

    @property
    def verdict(self) -> str:
        gold, nothing = ([o == "resolved" for o in ends] for ends in (self.gold, self.nothing))
        if not any(gold):
            return "nothing resolves it"
        if all(nothing):
            return "resolved without a patch"
        return "certified" if all(gold) and not any(nothing) else "flaky"


def certificate_line(certificate: Certificate) -> str:
    return json.dumps(asdict(certificate)) + "\n"


def read_certificates(folder: Path) -> Iterator[Certificate]:
    """Of a folder of tasks, or of a run, which has those that hold for it."""

    def read(record: dict[str, Any]) -> Certificate:
        ends = {name: tuple(record[name]) for name in ("gold", "nothing")}
        return Certificate(**record | ends)

    return read_jsonl(folder / CERTIFICATES, SCHEMA, read)


def place_of(kind: str, recipe: Recipe) -> str:
    """Where a certificate holds: bwrap with this machine's programs is not bwrap with images."""
    return f"{kind} {recipe.sandbox.images}" if recipe.sandbox.images else kind


def certificates(tasks: Sequence[Task], folder: Path, sandbox: str) -> dict[str, Certificate]:
    """Task id → its latest certificate by this harness, for its content and the sandbox."""
    keys = {task.task_id: content_key(task) for task in tasks}
    held = read_certificates(folder)
    return {c.task_id: c for c in held if (keys.get(c.task_id), sandbox) == (c.key, c.sandbox)}


async def certify(recipe: Recipe, console: Console) -> tuple[dict[str, Certificate], list[str]]:
    """(the certificates by task, the trials that certify nothing and why)"""
    tasks, times, folder = load_tasks(recipe.tasks.path), recipe.eval.attempts, recipe.tasks.path
    if recipe.agent.kind != "oracle" or recipe.eval.share_verdicts:
        text = "verify grades the oracle, each time: leave agent.kind and eval.share_verdicts"
        raise EvalkitError(text)
    gate, lost = Gate(recipe.eval.concurrency, recipe.eval.memory_mb), list[str]()
    path = folder / CERTIFICATES
    with TemporaryDirectory(prefix="nanoswe-verify-") as work, appending(path) as file:
        async with local_trials(Path(work) / "work", recipe, "") as (kind, run):
            place = place_of(kind, recipe)
            known = certificates(tasks, folder, place)
            todo = [t for t in tasks if len(getattr(known.get(t.task_id), "gold", ())) < times]
            nop: Run = partial(run, agent=NopAgent(), grade_empty=True)
            with progress(console, f"verify ({kind})", 2 * times * len(todo)) as advance:

                async def one(task: Task) -> None:
                    jobs: Any = {"gate": gate, "on_trial": advance}
                    both = [await run_trials([task], times, run=r, **jobs) for r in (run, nop)]
                    bad = [trial for trial in (*both[0], *both[1]) if trial.reward is None]
                    lost.extend(f"{trial.trial_id}: {trial.outcome} {trial.error}" for trial in bad)
                    if not bad:
                        known[task.task_id] = made = _certify(task, place, *both)
                        file.write(certificate_line(made))
                        file.flush()

                async with asyncio.TaskGroup() as group:
                    for task in todo:
                        group.create_task(one(task))
    return known, lost


def _certify(task: Task, sandbox: str, gold: list[Trial], nothing: list[Trial]) -> Certificate:
    with_gold, without = (_passes(trials) for trials in (gold, nothing))
    never = {test for test in (*task.fail_to_pass, *task.pass_to_pass) if not with_gold[test]}
    always = {test for test in task.fail_to_pass if without[test] == len(nothing)}
    once = {test for test, count in with_gold.items() if 0 < count < len(gold)}
    once |= {test for test in task.fail_to_pass if 0 < without[test] < len(nothing)}
    bad = next((t for t in gold if t.outcome is not Outcome.RESOLVED), None)
    why = bad.error or str((bad.report or {}).get("reason", "")) if bad else ""
    ends, ends_without = (tuple(str(t.outcome) for t in trials) for trials in (gold, nothing))
    wrong, flaky, key = tuple(sorted(never | always)), tuple(sorted(once)), content_key(task)
    return Certificate(task.task_id, key, sandbox, ends, ends_without, wrong, flaky, why)


def _passes(trials: Sequence[Trial]) -> Counter[str]:
    """Test → in how many trials it did what it has to."""
    reports: list[Any] = [trial.report or {} for trial in trials]
    lists = [r[k]["success"] for r in reports for k in ("fail_to_pass", "pass_to_pass") if k in r]
    return Counter(chain.from_iterable(lists))
