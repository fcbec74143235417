"""Ours and the peers, each as its users run it: a server process before the engine.

In: the engine's URL and the model folder. Out: sessions with a base URL, and per session `Row`s:
tokens, which of them train, and their logprobs. A peer that records calls one by one gets its rows
by the rule that its trainers use: a call extends a row whose tokens its prompt begins with.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx

HERE = Path(__file__).parent


@dataclass
class Row:
    tokens: list[int]
    mask: list[bool]
    logprobs: list[float | None]


@dataclass
class Export:
    rows: list[Row]
    accounted: int  # sampled tokens that the system says it saw, trained or masked with a reason
    incomplete: bool = False


class Process:
    """A child server, its log, and the URL that it prints or serves at."""

    def __init__(self, command: list, pattern: str, **env: str) -> None:
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        with self.log.open("w") as file:
            self.child = subprocess.Popen([str(c) for c in command], stdout=file, stderr=file,
                                          env=os.environ | env)  # fmt: skip
        self.pattern = re.compile(pattern)

    async def url(self, seconds: float = 180) -> str:
        for _ in range(int(seconds * 20)):
            if found := self.pattern.search(self.log.read_text()):
                return found[1]
            if self.child.poll() is not None:
                break
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self.child.args} did not start: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def memory(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def rig(folder: Path, *options: str) -> Process:
    command = [sys.executable, HERE / "rig.py", "--folder", folder, *options]
    return Process(command, r"(http://\S+)")


class Ours:
    name = "nanoswe-proxy"

    def __init__(self, engine: str, folder: Path, http: httpx.AsyncClient, *options: str) -> None:
        command = [sys.executable, "-c", "from nanoswe_proxy.cli import main; main()", "serve"]
        flags = ["--engine", engine, "--tokenizer", folder, "--port", 0, "--max-tokens", 120]
        self.process = Process([*command, *flags, *options], r"listening on (\S+)")
        self.http, self.caps = http, {}

    async def start(self) -> None:
        self.root = await self.process.url()

    async def open(self, name: str) -> str:
        answer = await self.http.post(f"{self.root}/sessions", json={"trial_id": name})
        self.caps[name] = answer.json()["cap"]
        return answer.json()["base_url"]

    async def export(self, name: str) -> Export:
        answer = await self.http.post(f"{self.root}/sessions/{self.caps[name]}/seal", timeout=120)
        record = json.loads(answer.text)
        rows = [
            Row(s["tokens"], [k == "s" for k in s["provenance"]], s["logprobs"])
            for s in record["samples"]
        ]
        return Export(rows, record["conservation"]["sampled"])

    def stop(self) -> None:
        self.process.stop()


class Rllm:
    """rllm-model-gateway: forwards chat, records what the engine rendered and sampled."""

    name = "rLLM model gateway 0.1.0"

    def __init__(self, engine: str, folder: Path, http: httpx.AsyncClient) -> None:
        self.port = free_port()
        python = peer_python("rllm_model_gateway")
        command = [python, "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", self.port,
                   "--worker", f"{engine}/v1", "--store", "memory"]  # fmt: skip
        self.process = Process(command, r"(running on)")
        self.http = http

    async def start(self) -> None:
        await self.process.url()
        self.root = f"http://127.0.0.1:{self.port}"

    async def open(self, name: str) -> str:
        answer = await self.http.post(f"{self.root}/sessions", json={"session_id": name})
        answer.raise_for_status()
        return f"{self.root}/sessions/{name}/v1"

    async def export(self, name: str) -> Export:
        await self.http.post(f"{self.root}/admin/flush")
        traces = (await self.http.get(f"{self.root}/sessions/{name}/traces")).json()
        traces = [t for t in traces if t["completion_token_ids"]]
        calls = [
            (t["prompt_token_ids"], t["completion_token_ids"], t["logprobs"] or [])
            for t in sorted(traces, key=lambda t: t["timestamp"])
        ]
        return Export(merged(calls), sum(len(c[1]) for c in calls))

    def stop(self) -> None:
        self.process.stop()


class Litellm:
    """litellm's proxy: the latency reference. It records no tokens."""

    name = "litellm proxy"

    def __init__(self, engine: str, folder: Path, http: httpx.AsyncClient) -> None:
        config = Path(tempfile.mkstemp(suffix=".yaml")[1])
        config.write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": {
            "model": "openai/tiny", "api_base": f"{engine}/v1", "api_key": "x"}}]}))  # fmt: skip
        self.port = free_port()
        python = peer_python("litellm")
        command = [python, "-c", "from litellm import run_server; run_server()", "--config", config,
                   "--host", "127.0.0.1", "--port", self.port, "--telemetry", "False"]  # fmt: skip
        self.process = Process(command, r"(running on)", LITELLM_LOCAL_MODEL_COST_MAP="True")

    async def start(self) -> None:
        await self.process.url()
        self.root = f"http://127.0.0.1:{self.port}"

    async def open(self, name: str) -> str:
        return f"{self.root}/v1"

    def stop(self) -> None:
        self.process.stop()


def merged(calls: list[tuple[list[int], list[int], list[float]]]) -> list[Row]:
    """Rows by exact prefix: a call goes on with the longest row that its prompt begins with."""
    rows: list[Row] = []
    for prompt, sampled, logprobs in calls:
        fits = [r for r in rows if prompt[: len(r.tokens)] == r.tokens]
        row = max(fits, key=lambda r: len(r.tokens), default=None)
        if row is None:
            row = Row([], [], [])
            rows.append(row)
        fresh = prompt[len(row.tokens) :]
        row.tokens += [*fresh, *sampled]
        row.mask += [False] * len(fresh) + [True] * len(sampled)
        padded = [*logprobs, *[None] * (len(sampled) - len(logprobs))]
        row.logprobs += [None] * len(fresh) + padded
    return rows


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def peer_python(module: str) -> str:
    """An interpreter that has `module`: PEERS names environments, separated by colons."""
    for python in [*os.environ.get("PEERS", "").split(":"), sys.executable]:
        if (
            python
            and not subprocess.run(
                [python, "-c", f"import importlib.util as u; assert u.find_spec('{module}')"],
                capture_output=True,
            ).returncode
        ):
            return python
    raise RuntimeError(f"no environment has {module}: name one in PEERS")
