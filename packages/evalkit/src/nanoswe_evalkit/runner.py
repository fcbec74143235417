"""`run_trials`: many trials at once, each recorded the moment it ends.

In: tasks, attempts, everything `run_trial` needs, and a file. Out: trials ordered by (task,
attempt), and trials.jsonl, from which an interrupted run resumes: a torn last line is cut off and
its trial runs again; so does one without a reward, and one of another task content or version of
the harness. Infrastructure errors get at most two new tries. Refuses a file of another schema, or
one that another process is writing.
"""

import asyncio
import fcntl
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import IO

from nanoswe_evalkit import __version__
from nanoswe_evalkit.agents.base import Agent, ModelConfig
from nanoswe_evalkit.grading import Grade, grade_patch
from nanoswe_evalkit.outcome import EvalkitError, Outcome
from nanoswe_evalkit.records import read_jsonl
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.trial import SCHEMA, Trial, from_record, run_trial, to_line
from nanoswe_harbor.task import Task, package_digest

MAX_TRIES = 3
log = logging.getLogger(__name__)

OpenSession = Callable[[str, int], Awaitable[str]]
CloseSession = Callable[[str, int], Awaitable[None]]


async def run_trials(
    tasks: Sequence[Task], attempts: int, *, agent: Agent, sandboxes: SandboxFactory,
    model: ModelConfig, concurrency: int | asyncio.Semaphore, base_url: str = "",
    open_session: OpenSession | None = None, close_session: CloseSession | None = None,
    trial_id: Callable[[Task, int], str] = lambda task, attempt: f"{task.task_id}.{attempt}",
    on_trial: Callable[[Trial], None] | None = None, path: Path | None = None,
    grade_empty: bool = False, grade: Grade = grade_patch
) -> list[Trial]:  # fmt: skip
    """Every attempt at every task, less those that `path` holds already, `concurrency` at a time;
    a semaphore bounds several calls together.

    `open_session(trial_id, try)` gives the base URL of one try, `close_session` ends it; without
    them `base_url` serves all. `on_trial` sees every trial that ran now, as it ends.
    """
    gate = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency
    done: dict[str, Trial] = {}

    run = partial(run_trial, agent=agent, sandboxes=sandboxes, model=model)
    run = partial(run, grade_empty=grade_empty, grade=grade)

    async def one(task: Task, attempt: int, file: IO[str] | None) -> None:
        name = trial_id(task, attempt)
        once = partial(run, task, attempt, trial_id=name)
        async with gate:
            trial = await _with_tries(name, once, base_url, open_session, close_session)
        if file:
            trial = replace(trial, key=keys[task.task_id])
            file.write(to_line(trial))
            file.flush()
        done[name] = trial
        if on_trial:
            on_trial(trial)

    jobs = [(task, attempt) for task in tasks for attempt in range(attempts)]
    keys = {task.task_id: f"{__version__} {package_digest(task.path)}" for task in tasks if path}
    with _recording(path) as (file, finished):
        for trial in finished:
            if trial.reward is not None and trial.key == keys.get(trial.task_id):
                done[trial.trial_id] = trial
        # The longest first, by what an earlier trial took; before them those we know nothing of.
        took = {trial.task_id: trial.timings.get("total_sec", 0.0) for trial in finished}
        todo = [job for job in jobs if trial_id(*job) not in done]
        todo.sort(key=lambda job: -took.get(job[0].task_id, inf))
        async with asyncio.TaskGroup() as group:
            for task, attempt in todo:
                group.create_task(one(task, attempt, file))
    return [done[trial_id(task, attempt)] for task, attempt in jobs]


async def _with_tries(
    trial_id: str, once: Callable[..., Awaitable[Trial]], base_url: str,
    open_session: OpenSession | None, close_session: CloseSession | None
) -> Trial:  # fmt: skip
    """Run a trial, again while the machinery fails; a session of its own for each try."""
    for try_ in range(MAX_TRIES):
        url = await open_session(trial_id, try_) if open_session else base_url
        try:
            trial = await once(base_url=url, try_=try_)
        finally:
            if close_session:
                await close_session(trial_id, try_)
        if trial.outcome is not Outcome.INFRA_ERROR:
            break
        log.warning("%s try %d: %s", trial_id, try_, trial.error)
    return trial


def read_trials(path: Path) -> list[Trial]:
    """The trials of a file, the last record of each id; a torn last line is ignored."""
    if not path.is_file():
        raise EvalkitError(f"{path.parent}: holds no {path.name}; name the folder of a run")
    trials = {trial.trial_id: trial for trial in read_jsonl(path, SCHEMA, from_record)}
    return list(trials.values())


@contextmanager
def _recording(path: Path | None) -> Iterator[tuple[IO[str] | None, list[Trial]]]:
    """The file, open to append and locked, and the trials in it."""
    if path is None:
        yield None, []
        return
    with path.open("a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"{path}: another run is writing it; wait, or choose a name"
            raise EvalkitError(text) from error
        trials = read_trials(path)
        file.truncate(path.read_bytes().rfind(b"\n") + 1)
        yield file, trials
