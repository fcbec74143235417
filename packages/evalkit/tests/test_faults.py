"""What else goes wrong in the middle of a run: after it is run again, the results are what an
undisturbed run gives. (kill -9 is in test_runner.py, a killed proxy in test_proxied.py.)
"""

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, _encode, _head, call
from test_trial import _fix

from nanoswe_harbor.task import Task, load_tasks

pytestmark = pytest.mark.interop
COMMAND = [sys.executable, "-m", "nanoswe_evalkit.cli", "run", "r.yaml"]


def _recipe(folder: Path, tasks: Path, attempts: int, rest: str) -> Path:
    """Writes r.yaml; where its trials will be recorded."""
    text = f"name: r\ntasks: {{path: {tasks}}}\neval: {{attempts: {attempts}, concurrency: 2}}\n"
    (folder / "r.yaml").write_text(text + rest)
    return folder / "runs" / "r" / "trials.jsonl"


def _results(record: Path) -> dict[str, str]:
    """Trial id → its last outcome."""
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    return {row["trial_id"]: row["outcome"] for row in rows}


def _wait_for(record: Path, lines: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 180
    while not record.exists() or record.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


@contextmanager
def _daemon() -> Iterator[tuple[dict[str, str], Any]]:
    """A Docker daemon of the test's own, and what kills it and starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="nd"))  # a socket's path is short
    host = f"unix://{folder}/d.sock"
    # A network of its own: a daemon without a bridge removes docker0, be it another daemon's.
    argv = ["unshare", "--net", "dockerd", "-H", host]
    argv += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    argv += ["--pidfile", f"{folder}/pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
    env = {**os.environ, "DOCKER_HOST": host}
    running: list[subprocess.Popen[Any]] = []

    def start() -> None:
        with (folder / "log").open("ab") as log:
            running.append(subprocess.Popen(argv, stdout=log, stderr=log))
        for _ in range(600):
            asked = subprocess.run(["docker", "info"], env=env, capture_output=True, check=False)
            if asked.returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError((folder / "log").read_text()[-3000:])

    def restart(pause_sec: float) -> None:
        running[-1].terminate()  # its containers end with it
        running[-1].wait()
        time.sleep(pause_sec)
        start()

    start()
    try:
        yield env, restart
    finally:
        running[-1].terminate()
        running[-1].wait()
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (mount := line.split()[1]).startswith(f"{folder}/"):  # a killed daemon's
                subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(folder)


def test_a_docker_daemon_that_restarts(nano: Path, tmp_path: Path) -> None:
    text = (
        "FROM debian:bookworm-slim\nRUN command -v git python3 || (apt-get update -qq && apt-get "
    )
    text += "install -qq -y --no-install-recommends git python3)\n"
    tag = "nanoswe-test/faults:local"
    build = ["docker", "build", "-q", "-t", tag, "-"]
    subprocess.run(build, input=text, text=True, check=True, capture_output=True)
    shutil.copytree(nano, tmp_path / "nano")
    for task in load_tasks(tmp_path / "nano" / "train"):
        settings = task.path / "task.toml"
        kept = [x for x in settings.read_text().splitlines() if not x.startswith("docker_image")]
        kept[kept.index("[environment]")] += f'\ndocker_image = "{tag}"'
        settings.write_text("\n".join(kept) + "\n")
    rest = "agent: {kind: oracle}\nsandbox: {kind: docker}\n"
    record = _recipe(tmp_path, tmp_path / "nano" / "train", 4, rest)
    rng = random.Random(0)
    with _daemon() as (env, restart):
        with subprocess.Popen(["docker", "save", tag], stdout=subprocess.PIPE) as saved:
            subprocess.run(["docker", "load"], stdin=saved.stdout, env=env, check=True)
        for lines in (2, 6):
            process = subprocess.Popen(COMMAND, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
            _wait_for(record, lines, process)
            time.sleep(rng.random())
            restart(rng.random())
            assert process.wait(timeout=240) in (0, 1, 2)  # tries again, or says that it can't
        done = subprocess.run(COMMAND, cwd=tmp_path, env=env, check=False, timeout=240)
        assert done.returncode == 0
        left = subprocess.run(["docker", "ps", "-aq"], env=env, capture_output=True, check=True)
        assert left.stdout == b""
    assert Counter(_results(record).values()) == {"resolved": 12}


@pytest.mark.parametrize("lines", [0, 3, 8])
def test_a_full_disk(nano: Path, tmp_path: Path, lines: int) -> None:
    """The disk of the run's folder fills up when so many trials are done, and is cleared again."""
    record = _recipe(tmp_path, nano / "train", 8, "agent: {kind: oracle}\nsandbox: {kind: bwrap}\n")
    (tmp_path / "runs").mkdir()
    command, log = " ".join(COMMAND), "runs/r/trials.jsonl"
    script = f"""
        mount -t tmpfs -o size=80m none runs
        {command} 2> full.log & harness=$!
        while [ "$(cat {log} 2> /dev/null | wc -l)" -lt {lines} ]; do sleep 0.02; done
        cat /dev/zero > runs/filler 2> /dev/null
        wait $harness; echo $? > full.code
        rm runs/filler
        {command} 2> again.log; echo $? > again.code
        cp -r runs kept
    """
    flags = "-m" if os.getuid() == 0 else "-rm"
    subprocess.run(["unshare", flags, "sh", "-c", script], cwd=tmp_path, check=True, timeout=400)
    first = (tmp_path / "full.log").read_text()
    assert (tmp_path / "full.code").read_text() in ("1\n", "2\n"), first
    assert "Traceback" not in first
    assert re.search(r"space|disk", first), first  # whoever met it says it in words of its own
    assert (tmp_path / "again.code").read_text() == "0\n", (tmp_path / "again.log").read_text()
    kept = tmp_path / "kept" / record.relative_to(tmp_path / "runs")
    assert Counter(_results(kept).values()) == {"resolved": 24}


class HangingModel(FakeModel):
    """Answers by how far the conversation is; every fifth request it takes and never answers."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            (size,) = (int(x.split(":")[1]) for x in head if x.startswith("content-length"))
            self.requests.append(json.loads(await reader.readexactly(size)))
            if len(self.requests) % 5 == 0:
                await reader.read()  # until the client hangs up
                break
            said = sum(m["role"] == "assistant" for m in self.requests[-1]["messages"])
            status, body = _encode(self.replies[said])
            text = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(text.encode() + body)
        writer.close()


def test_an_engine_that_hangs(nano: Path, task: Task, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    shutil.copytree(task.path, tmp_path / "one" / task.task_id)
    (tmp_path / "mirror").symlink_to(nano / "mirror")

    async def main() -> dict[str, str]:
        replies = [call(f"{_fix(task)}"), call("submit")]
        model = HangingModel(replies)
        server = await asyncio.start_server(model.accept, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        rest = f"sandbox: {{kind: bwrap}}\nmodel: {{base_url: {url}, timeout_sec: 2}}\n"
        record = _recipe(tmp_path, tmp_path / "one", 8, rest)
        for _ in range(3):
            process = await asyncio.create_subprocess_exec(*COMMAND, cwd=tmp_path, stderr=-3)
            if await process.wait() == 0:
                break
        server.close()
        return _results(record)

    results = asyncio.run(main())
    assert Counter(results.values()) == {"resolved": 8}
