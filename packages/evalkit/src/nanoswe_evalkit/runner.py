"""`run_trials`: many trials at once, each recorded the moment it ends.

In: tasks, attempts, what runs one trial (here or on other machines), and a file. Out: trials
ordered by (task, attempt), and trials.jsonl, from which an interrupted run resumes: a torn last
line is cut off and its trial runs again; so does one without a reward, and one of another task
content or version of the harness. Infrastructure errors get at most two new tries, after a pause.
Ends where a model's service refuses the key, or knows no such model. Refuses a file
of another schema, one that another process is writing, and a task that wants too much memory.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, Any

from nanoswe_evalkit import __version__
from nanoswe_evalkit.outcome import EvalkitError, Outcome
from nanoswe_evalkit.records import appending, read_jsonl
from nanoswe_evalkit.trial import SCHEMA, Trial, from_record, to_line
from nanoswe_harbor.task import Task, package_digest

MAX_TRIES, PAUSE_SEC, MOST_PAUSE_SEC = 3, 1.0, 60.0
REFUSED = (401, 403, 404)  # the next trial would hear the same, but for one with a new session
CHECK = "check model.base_url, model.name and the key; run again to resume, what has ended is kept"
log = logging.getLogger(__name__)

Run = Callable[..., Coroutine[Any, Any, Trial]]
"""`run_trial` as a run calls it: (task, attempt, trial_id=, base_url=, try_=)."""
OpenSession = Callable[[str, int], Awaitable[str]]
CloseSession = Callable[[str, int], Awaitable[int]]


class Gate:
    """Bounds the trials at once, of several calls together: by number, and by the memory that their
    tasks ask for. Whoever waits goes in turn, so that a large task is not starved by small ones.
    """

    def __init__(self, trials: int, memory_mb: float = 0) -> None:
        self.memory_mb = self._free_mb = memory_mb or inf
        self._trials, self._turn = asyncio.Semaphore(trials), asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, task: Task) -> AsyncIterator[float]:
        """Yields the seconds that it took to get in."""
        began = time.monotonic()
        async with self._trials:
            async with self._turn:
                while self._free_mb < task.memory_mb:
                    self._freed.clear()
                    await self._freed.wait()
                self._free_mb -= task.memory_mb
            try:
                yield round(time.monotonic() - began, 4)
            finally:
                self._free_mb += task.memory_mb
                self._freed.set()


async def run_trials(
    tasks: Sequence[Task], attempts: int, *, run: Run, gate: Gate, base_url: str = "",
    open_session: OpenSession | None = None, close_session: CloseSession | None = None,
    trial_id: Callable[[Task, int], str] = lambda task, attempt: f"{task.task_id}.{attempt}",
    on_trial: Callable[[Trial], None] | None = None, path: Path | None = None, settings: str = ""
) -> list[Trial]:  # fmt: skip
    """Every attempt at every task, less those that `path` holds already, as many at a time as fit
    through `gate`.

    `open_session(trial_id, try)` gives the base URL of one try, `close_session` ends it and says
    how many model calls it saw; without them `base_url` serves all. `on_trial` sees every trial
    that ran now, as it ends. What `path` holds under other `settings` counts for nothing.
    """
    if large := [task.task_id for task in tasks if task.memory_mb > gate.memory_mb]:
        raise EvalkitError(f"{large[0]} asks for more memory than there is; raise eval.memory_mb")
    done: dict[str, Trial] = {}

    async def one(task: Task, attempt: int, file: IO[str] | None) -> None:
        name = trial_id(task, attempt)
        once = partial(_try, run, task, attempt, name, base_url, open_session, close_session)
        async with gate.hold(task) as waited:
            trial = await _tries(once, name, not open_session)
        clocks = {"queue_sec": waited} | trial.timings
        trial = replace(trial, timings=clocks, key=keys.get(task.task_id, ""))
        if file:
            file.write(to_line(trial))
            file.flush()
        done[name] = trial
        if on_trial:
            on_trial(trial)

    jobs = [(task, attempt) for task in tasks for attempt in range(attempts)]
    keys = {task.task_id: content_key(task, settings) for task in tasks if path}
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


async def _tries(once: Callable[[int], Awaitable[Trial]], name: str, same_url: bool) -> Trial:
    """The first that our machinery did not lose, or the last."""
    tries: list[str] = []
    while (trial := await once(len(tries))).outcome is Outcome.INFRA_ERROR:
        log.warning("%s try %d: %s", name, len(tries), trial.error)
        if trial.agent.get("model_status") in REFUSED and same_url:
            raise EvalkitError(f"{trial.error}; {CHECK}")
        if len(tries) == MAX_TRIES - 1:
            break
        later = trial.agent.get("retry_after_sec", PAUSE_SEC * 2 ** len(tries))
        tries.append(trial.error)
        await asyncio.sleep(min(later, MOST_PAUSE_SEC))
    return replace(trial, tries=tuple(tries))


async def _try(
    run: Run, task: Task, attempt: int, trial_id: str, base_url: str,
    open_session: OpenSession | None, close_session: CloseSession | None, try_: int
) -> Trial:  # fmt: skip
    """One try, in a session of its own, whose model calls it reconciles."""
    calls = None
    try:
        url = await open_session(trial_id, try_) if open_session else base_url
        try:
            trial = await run(task, attempt, trial_id=trial_id, base_url=url, try_=try_)
        finally:
            if close_session:
                calls = await close_session(trial_id, try_)
    except EvalkitError as error:
        lost: Any = (None, Outcome.INFRA_ERROR, None, 0, "", None, {}, str(error))
        return Trial(trial_id, task.task_id, attempt, try_, *lost)
    if calls is None:
        return trial
    said = trial.agent.get("model_calls", trial.turns)
    agent = trial.agent | {"proxy_calls": calls, "unreconciled_calls": calls - said}
    differ = [f"the agent counts {said} model calls, the proxy {calls}"] * (said != calls)
    return replace(trial, agent=agent, error="; ".join(filter(None, [trial.error, *differ])))


def content_key(task: Task, settings: str = "") -> str:
    """What a stored verdict is worth only for: this harness, content of the task, and settings."""
    return " ".join(filter(None, (__version__, package_digest(task.path), settings)))


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
    with appending(path) as file:
        yield file, read_trials(path)
