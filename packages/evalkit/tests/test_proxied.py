"""`model.proxy`: evaluations through a real nanoswe-proxy process, which is killed in the middle.

Needs the proxy beside us: `nox --session agents`.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_proxy import tokenizer_folder, use
from test_trial import _fix

from nanoswe_evalkit.runner import read_trials
from nanoswe_harbor.task import Task

pytestmark = pytest.mark.interop
PORT = 18471


@contextmanager
def _proxy(folder: Path, replies: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`nanoswe-proxy serve` before a scripted engine, at our port."""
    if not (folder / "model").exists():
        tokenizer_folder(folder / "model")
    (folder / "replies.json").write_text(json.dumps(replies))
    program = str(Path(sys.executable).with_name("nanoswe-proxy"))
    argv = [program, "serve", "--port", str(PORT)]
    argv += [
        "--engine",
        f"scripted:{folder / 'replies.json'}",
        "--tokenizer",
        str(folder / "model"),
    ]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "listening" in process.stderr.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _run(folder: Path, tasks: Path, attempts: int) -> subprocess.Popen[str]:
    (folder / "r.yaml").write_text(
        f"name: r\ntasks: {{path: {tasks}}}\nsandbox: {{kind: bwrap}}\nseed: 5\n"
        f"model: {{proxy: 'http://127.0.0.1:{PORT}', max_tokens: 900, temperature: 0.5}}\n"
        f"eval: {{attempts: {attempts}, concurrency: 2}}\n"
    )
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", "r.yaml"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def test_a_proxy_that_is_killed(nano: Path, task: Task, tmp_path: Path) -> None:
    tasks = tmp_path / "one"
    tasks.mkdir()
    (tasks / task.task_id).symlink_to(task.path)
    (tmp_path / "mirror").symlink_to(nano / "mirror")
    replies = [use("bash", command=_fix(task)), use("bash", command="submit")]
    record = tmp_path / "runs" / "r" / "trials.jsonl"
    with _proxy(tmp_path, replies) as proxy:
        run = _run(tmp_path, tasks, 8)
        deadline = time.monotonic() + 120
        while not record.exists() or record.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.02)
        proxy.kill()
        _, err = run.communicate(timeout=240)
        assert run.returncode == 1 and "Traceback" not in err, err
    lost = [trial for trial in read_trials(record) if trial.reward is None]
    assert 0 < len(lost) <= 5 and all(trial.error for trial in lost)
    with _proxy(tmp_path, replies):
        run = _run(tmp_path, tasks, 8)
        assert run.communicate(timeout=240) and run.returncode == 0
    trials = read_trials(record)
    assert Counter(str(trial.outcome) for trial in trials) == {"resolved": 8}
    assert [trial.agent["proxy_calls"] for trial in trials] == [trial.turns for trial in trials]
    assert {trial.turns for trial in trials} == {2} and not any(trial.error for trial in trials)
    lines = (tmp_path / "runs" / "r" / "trajectories.jsonl").read_text().splitlines()
    kept = {line["trial_id"]: line for line in map(json.loads, lines)}
    assert kept.keys() == {trial.trial_id for trial in trials}
    assert all(line["temperature"] == 0.5 for line in kept.values())
    assert {line["seed_key"] for line in kept.values()} == {f"5/{name}" for name in kept}
