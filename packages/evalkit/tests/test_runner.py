"""Many trials: order, resume, torn lines, retries, one writer, Ctrl-C."""

import asyncio
import fcntl
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from nanoswe_evalkit import runner
from nanoswe_evalkit.agents.base import (
    Agent,
    Job,
    ModelConfig,
    ModelError,
    NopAgent,
    OracleAgent,
    refused,
)
from nanoswe_evalkit.grading import SharedVerdicts
from nanoswe_evalkit.outcome import EvalkitError, Outcome, Stop
from nanoswe_evalkit.place import local_trials
from nanoswe_evalkit.recipe import Recipe
from nanoswe_evalkit.records import appending
from nanoswe_evalkit.runner import CloseSession, Gate, OpenSession, read_trials, run_trials
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Sandbox, SandboxError
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import Task, load_tasks


class FlakyAgent:
    """Fails its first `failures` runs; keeps how many ran at once, and the URLs it was given."""

    def __init__(self, failures: int) -> None:
        self.failures, self.now, self.most = failures, 0, 0
        self.urls: list[str] = []

    async def run(self, job: Job) -> Stop:
        self.urls.append(job.base_url)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.2)
        self.now -= 1
        if len(self.urls) <= self.failures:
            raise ModelError("down")
        return Stop.FINISHED

    async def close(self) -> None: ...


def _run(
    sandboxes: SandboxFactory,
    tasks: list[Task],
    agent: Agent,
    path: Path | None = None,
    attempts: int = 2,
    open_session: OpenSession | None = None,
    close_session: CloseSession | None = None,
    gate: Gate | None = None,
) -> tuple[list[Trial], list[str]]:
    """(the trials, the ids that ran now)"""
    ran: list[str] = []
    trials = asyncio.run(
        run_trials(
            tasks,
            attempts,
            run=partial(run_trial, agent=agent, sandboxes=sandboxes, model=ModelConfig("m")),
            gate=gate or Gate(2),
            path=path,
            open_session=open_session,
            close_session=close_session,
            on_trial=lambda trial: ran.append(trial.trial_id),
        )
    )
    return trials, ran


def test_order_and_concurrency(sandboxes: SandboxFactory, tasks: list[Task]) -> None:
    agent = FlakyAgent(0)
    trials, _ = _run(sandboxes, tasks, agent)
    assert [(t.task_id, t.attempt) for t in trials] == [
        (task.task_id, attempt) for task in tasks for attempt in range(2)
    ]
    assert agent.most == 2


def test_resume_runs_only_what_is_missing(
    sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path
) -> None:
    path = tmp_path / "trials.jsonl"
    first, ran = _run(sandboxes, tasks[:2], NopAgent(), path)
    assert len(ran) == 4
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])  # killed in the middle of a line
    torn = {t.trial_id for t in first} - {t.trial_id for t in read_trials(path)}
    again, ran = _run(sandboxes, tasks[:2], NopAgent(), path)
    assert set(ran) == torn and len(torn) == 1
    assert [t.trial_id for t in again] == [t.trial_id for t in first]
    assert len(path.read_bytes().splitlines()) == 4
    assert _run(sandboxes, tasks[:2], NopAgent(), path)[1] == []


def test_waiting_for_a_place_has_a_clock_of_its_own(
    sandboxes: SandboxFactory, tasks: list[Task]
) -> None:
    run = partial(run_trial, agent=FlakyAgent(0), sandboxes=sandboxes, model=ModelConfig("m"))
    trials = asyncio.run(run_trials(tasks[:2], 2, run=run, gate=Gate(1)))
    waits = sorted(trial.timings["queue_sec"] for trial in trials)
    assert waits[0] < 0.1 and all(b - a >= 0.2 for a, b in pairwise(waits))  # each sleeps 0.2 s
    assert all(trial.timings["total_sec"] < waits[-1] for trial in trials)


def test_garbage_in_the_middle_is_refused(
    sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path
) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text('{"schema": "trial/9"}\n')
    with pytest.raises(EvalkitError, match=r"trials\.jsonl:1: .*schema trial/1"):
        _run(sandboxes, tasks, NopAgent(), path)


def test_one_writer_at_a_time(sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(EvalkitError, match="another run"):
            _run(sandboxes, tasks, NopAgent(), path)


def test_infrastructure_errors_get_two_more_tries_and_sessions(
    sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path
) -> None:
    closed: list[tuple[str, int]] = []

    async def open_session(trial_id: str, try_: int) -> str:
        return f"http://x/{trial_id}/{try_}"

    async def close_session(trial_id: str, try_: int) -> int:
        closed.append((trial_id, try_))
        return 0

    path, name = tmp_path / "trials.jsonl", f"{tasks[0].task_id}.0"
    agent = FlakyAgent(2)
    (trial,), _ = _run(sandboxes, tasks[:1], agent, path, 1, open_session, close_session)
    assert (trial.try_, trial.outcome) == (2, Outcome.NO_PATCH)
    assert agent.urls == [f"http://x/{name}/{try_}" for try_ in range(3)]
    assert closed == [(name, 0), (name, 1), (name, 2)]
    assert trial.tries == ("down", "down") and read_trials(path) == [trial]


def test_a_trial_without_reward_is_recorded_and_runs_again(
    sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path
) -> None:
    path = tmp_path / "trials.jsonl"
    (trial,), _ = _run(sandboxes, tasks[:1], FlakyAgent(9), path, 1)
    assert (trial.outcome, trial.reward, trial.error) == (Outcome.INFRA_ERROR, None, "down")
    (trial,), ran = _run(sandboxes, tasks[:1], NopAgent(), path, 1)
    assert trial.reward == 0.0 and ran == [trial.trial_id]
    assert read_trials(path) == [trial]


def _refused(status: int, text: str, retry_after: str = "") -> ModelError:
    headers = {"retry-after": retry_after} if retry_after else {}
    return refused("http://x/v1", httpx.Response(status, text=text, headers=headers))


class ServedAgent:
    """Hears `errors` of its model's service, one a run, then is done; keeps when it was asked."""

    def __init__(self, *errors: ModelError) -> None:
        self.errors, self.asked = list(errors), list[float]()

    async def run(self, job: Job) -> Stop:
        self.asked.append(time.monotonic())
        if len(self.asked) <= len(self.errors):
            raise self.errors[len(self.asked) - 1]
        return Stop.FINISHED

    async def close(self) -> None: ...


def test_between_tries_there_is_a_pause_as_long_as_the_service_says(
    sandboxes: SandboxFactory, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PAUSE_SEC", 0.4)
    monkeypatch.setattr(runner, "MOST_PAUSE_SEC", 1.2)
    for errors, pauses in (
        ([ModelError("down")] * 2, [0.4, 0.8]),
        ([_refused(429, "slow", "1"), _refused(429, "slow", "3600")], [1.0, 1.2]),
        ([_refused(429, "a date", "Wed, 21 Oct 2026 07:28:00 GMT"),
          _refused(503, "-1", "-1")], [0.4, 0.0]),
    ):  # fmt: skip
        agent = ServedAgent(*errors)
        (trial,), _ = _run(sandboxes, tasks[:1], agent, attempts=1)
        assert trial.outcome is Outcome.NO_PATCH and len(trial.tries) == 2
        waited = [after - before for before, after in pairwise(agent.asked)]
        assert all(0 <= w - p < 1 for w, p in zip(waited, pauses, strict=True)), waited


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_service_that_refuses_us_ends_the_run(
    sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path, status: int
) -> None:
    path, agent = tmp_path / "trials.jsonl", ServedAgent()
    _run(sandboxes, tasks[:1], agent, path, 1)
    agent.errors = [ModelError("")] + [_refused(status, "no such key")] * 20
    with pytest.raises(ExceptionGroup) as caught:
        _run(sandboxes, tasks, agent, path, 1, gate=Gate(1))
    (error,) = caught.value.exceptions
    assert isinstance(error, EvalkitError) and f"http://x/v1: HTTP {status} no such" in str(error)
    assert "check model.base_url" in str(error) and len(agent.asked) == 2  # not once a task
    assert [trial.task_id for trial in read_trials(path)] == [tasks[0].task_id]
    assert len(_run(sandboxes, tasks, NopAgent(), path, 1)[1]) == 2


def test_a_session_that_its_proxy_lost_does_not_end_the_run(
    sandboxes: SandboxFactory, tasks: list[Task]
) -> None:
    async def open_session(trial_id: str, try_: int) -> str:
        return "http://x"

    agent = ServedAgent(_refused(404, "no session has this capability"))
    (trial,), _ = _run(sandboxes, tasks[:1], agent, attempts=1, open_session=open_session)
    assert (trial.outcome, trial.try_) == (Outcome.NO_PATCH, 1)


class SlowAgent:
    """Takes its time by task; keeps the order in which it was asked."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.asked = seconds, list[str]()

    async def run(self, job: Job) -> Stop:
        self.asked.append(job.task.task_id)
        await asyncio.sleep(self.seconds[job.task.task_id])
        return Stop.FINISHED

    async def close(self) -> None: ...


def test_the_longest_go_first_by_recorded_times(
    sandboxes: SandboxFactory, tasks: list[Task], tmp_path: Path
) -> None:
    short, long, middle = (task.task_id for task in tasks)
    agent = SlowAgent({short: 0, long: 4, middle: 2})
    record = tmp_path / "trials.jsonl"
    _run(sandboxes, tasks, agent, record, 1)
    agent.asked.clear()
    trials, _ = _run(sandboxes, tasks, agent, record, 2)
    assert agent.asked[-1] == short and set(agent.asked[:2]) == {long, middle}
    assert [t.task_id for t in trials] == [t.task_id for t in tasks for _ in range(2)]


def test_a_changed_task_is_not_answered_by_an_old_trial(
    nano: Path, sandboxes: SandboxFactory, tmp_path: Path
) -> None:
    shutil.copytree(nano / "train", tmp_path / "train")
    record = tmp_path / "trials.jsonl"
    _, ran = _run(sandboxes, load_tasks(tmp_path / "train"), NopAgent(), record, 1)
    assert len(ran) == 3
    changed = load_tasks(tmp_path / "train")[1]
    with (changed.path / "instruction.md").open("a") as file:
        file.write("Also this.\n")
    _, ran = _run(sandboxes, load_tasks(tmp_path / "train"), NopAgent(), record, 1)
    assert ran == [f"{changed.task_id}.0"]


@pytest.mark.parametrize(
    "kills",
    [2, pytest.param(10, marks=pytest.mark.interop), pytest.param(50, marks=pytest.mark.soak)],
)
def test_kill_at_any_moment_loses_no_trial_and_runs_none_twice(
    nano: Path, tmp_path: Path, kills: int
) -> None:
    attempts, rng = 4 * kills, random.Random(kills)
    (tmp_path / "r.yaml").write_text(
        f"name: r\ntasks: {{path: {nano / 'train'}}}\nagent: {{kind: oracle}}\n"
        f"eval: {{attempts: {attempts}, concurrency: 2}}\n"
    )
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", str(tmp_path / "r.yaml")]
    record = tmp_path / "runs" / "r" / "trials.jsonl"
    whole: list[bytes] = []  # the whole lines of the record, which no resumption may touch
    for _ in range(kills):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        more, deadline = len(whole) + rng.randrange(4), time.monotonic() + 120
        while process.poll() is None and _lines(record) < more:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() / 2)  # anywhere in what comes next
        process.kill()
        process.wait()
        lines = record.read_bytes().split(b"\n")[:-1] if record.exists() else []
        assert lines[: len(whole)] == whole
        whole = lines
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, check=True)
    summary = json.loads(done.stdout)
    assert summary["outcomes"] == {"resolved": 3 * attempts}
    ids = [json.loads(line)["trial_id"] for line in record.read_bytes().splitlines()]
    assert len(ids) == len(set(ids)) == 3 * attempts
    assert not (tmp_path / "runs" / "r" / "work").exists()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_ctrl_c_leaves_a_resumable_run_and_no_process(nano: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", str(tmp_path / "r.yaml")]
    (tmp_path / "r.yaml").write_text(
        f"name: r\ntasks: {{path: {nano / 'train'}}}\nagent: {{kind: oracle}}\n"
        "eval: {attempts: 40, concurrency: 2}\n"
    )
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    record = tmp_path / "runs" / "r" / "trials.jsonl"
    deadline = time.monotonic() + 30
    while not (record.exists() and record.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"to resume" in err and b"Traceback" not in err
    assert len(read_trials(record)) >= 3
    assert not (tmp_path / "runs" / "r" / "work").exists()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in left


class CountingFactory(SandboxFactory):
    """Counts the sandboxes it opens; the ones to `fail` do not start."""

    opened, fail = 0, frozenset[int]()

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        self.opened += 1
        if self.opened in self.fail:
            raise SandboxError("no room")
        async with super().open(task) as sandbox:
            yield sandbox


def test_equal_patches_share_a_verdict(
    sandboxes: SandboxFactory, nano: Path, tasks: list[Task]
) -> None:
    counting = CountingFactory("bwrap", sandboxes.work, nano / "mirror", sandboxes.limits)
    pairs = [(task, agent) for task in tasks[:2] for agent in (OracleAgent(), NopAgent())] * 3

    async def main() -> list[Trial]:
        grade = SharedVerdicts(sandboxes.work).grade
        run = partial(run_trial, sandboxes=counting, base_url="", model=ModelConfig("m"))
        return [
            await run(task, i, trial_id=f"t.{i}", agent=agent, grade=grade, grade_empty=True)
            for i, (task, agent) in enumerate(pairs)
        ]

    counting.fail = frozenset({2})  # the first grading; its failure is nobody's verdict
    trials = asyncio.run(main())
    assert trials[0].outcome is Outcome.INFRA_ERROR
    rewards = [float(isinstance(agent, OracleAgent)) for _, agent in pairs]
    assert [trial.reward for trial in trials[1:]] == rewards[1:]
    assert counting.opened == len(pairs) + 1 + 4  # agents, the failure, one grading a patch


def test_trials_wait_for_memory_in_turn(sandboxes: SandboxFactory, tasks: list[Task]) -> None:
    """Of 4 GB: 3 GB do not fit beside 2 GB, and nothing overtakes them; 1 GB fits beside."""
    sizes = (2048, 3072, 1024)
    small, large, last = (replace(t, memory_mb=mb) for t, mb in zip(tasks, sizes, strict=True))
    agent = SlowAgent({small.task_id: 0.5, large.task_id: 0.2, last.task_id: 0.2})
    running: list[set[str]] = []

    async def watched(job: Job) -> Stop:
        now = (running[-1] if running else set()) | {job.task.task_id}
        running.append(now)
        try:
            return await SlowAgent.run(agent, job)
        finally:
            running.append(running[-1] - {job.task.task_id})

    agent.run = watched  # type: ignore[method-assign]
    gate = Gate(8, 4096)
    trials, _ = _run(sandboxes, [small, large, last], agent, gate=gate, attempts=1)
    assert [t.outcome for t in trials] == [Outcome.NO_PATCH] * 3
    assert agent.asked[0] == small.task_id
    assert all(now != {small.task_id, large.task_id} for now in running)
    assert {large.task_id, last.task_id} in running
    with pytest.raises(EvalkitError, match=f"{large.task_id} asks for more memory"):
        _run(sandboxes, [large], agent, gate=Gate(8, 3000), attempts=1)


def test_model_calls_that_the_proxy_counts_otherwise_are_named(
    sandboxes: SandboxFactory, tasks: list[Task]
) -> None:
    async def open_session(trial_id: str, try_: int) -> str:
        return "http://x"

    async def close_session(trial_id: str, try_: int) -> int:
        return 3 * trial_id.endswith("0")

    sessions = {"open_session": open_session, "close_session": close_session}
    (odd, right), _ = _run(sandboxes, tasks[:1], NopAgent(), **sessions)
    counts = [{"proxy_calls": n, "unreconciled_calls": n} for n in (3, 0)]
    assert [odd.agent, right.agent] == counts
    assert odd.error == "the agent counts 0 model calls, the proxy 3" and right.error == ""
    assert odd.reward == 0.0  # a verdict all the same


def test_a_session_that_cannot_open_is_our_fault(
    sandboxes: SandboxFactory, tasks: list[Task]
) -> None:
    opened: list[int] = []

    async def open_session(trial_id: str, try_: int) -> str:
        opened.append(try_)
        raise ModelError("proxy: gone")

    (trial,), _ = _run(sandboxes, tasks[:1], NopAgent(), attempts=1, open_session=open_session)
    assert (trial.outcome, trial.reward, trial.error) == (
        Outcome.INFRA_ERROR, None, "proxy: gone",
    )  # fmt: skip
    assert opened == [0, 1, 2]


def test_a_second_run_in_the_same_folder_leaves_the_first_alone(nano: Path, tmp_path: Path) -> None:
    fields = {"name": "r", "tasks": {"path": nano / "train"}, "sandbox": {"kind": "bwrap"}}
    recipe, work = Recipe.model_validate(fields), tmp_path / "work"

    async def main() -> None:
        async with local_trials(work, recipe, ""):
            (work / "a checkout").mkdir()
            with pytest.raises(EvalkitError, match="another run is writing it"):
                async with local_trials(work, recipe, ""):
                    raise AssertionError
            assert (work / "a checkout").exists()
        assert not work.exists()

    asyncio.run(main())


def test_what_is_appended_follows_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for before, after in (("", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("b", "")):
        path.write_text(before)
        with appending(path) as file:
            file.write("c\n")
        assert path.read_text() == after + "c\n"
