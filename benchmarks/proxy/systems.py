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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import httpx

HERE = Path(__file__).parent
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1",
           "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}  # fmt: skip


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
    name, probe, tokens_in = "nanoswe-proxy", "/healthz", True

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


class Peer(ABC):
    """A peer's server on a port of its own, from the environment that has it."""

    name, module, pattern, probe = "", "", r"(running on)", "/health"
    tokens_in = False  # it asks the engine for chat, and so does the direct arm

    def __init__(self, engine: str, folder: Path, http: httpx.AsyncClient) -> None:
        self.engine, self.folder, self.http, self.port = engine, folder, http, free_port()
        self.root = f"http://127.0.0.1:{self.port}"
        python = peer_python(self.module)
        self.process = Process([python, *map(str, self.command())], self.pattern, **OFFLINE)

    @abstractmethod
    def command(self) -> list: ...

    async def start(self) -> None:
        await self.process.url()

    async def post(self, path: str, body: object) -> dict:
        return (await self.http.post(self.root + path, json=body)).raise_for_status().json()

    async def get(self, path: str) -> dict:
        return (await self.http.get(self.root + path, timeout=120)).raise_for_status().json()

    def stop(self) -> None:
        self.process.stop()


class Rllm(Peer):
    """rllm-model-gateway: forwards chat, records what the engine rendered and sampled."""

    name, module = "rLLM model gateway 0.1.0", "rllm_model_gateway"

    def command(self) -> list:
        return ["-m", self.module, "--host", "127.0.0.1", "--port", self.port, "--worker",
                f"{self.engine}/v1", "--store", "memory"]  # fmt: skip

    async def open(self, name: str) -> str:
        await self.post("/sessions", {"session_id": name})
        return f"{self.root}/sessions/{name}/v1"

    async def export(self, name: str) -> Export:
        await self.http.post(f"{self.root}/admin/flush")
        traces = [
            t for t in await self.get(f"/sessions/{name}/traces") if t["completion_token_ids"]
        ]
        calls = [
            (t["prompt_token_ids"], t["completion_token_ids"], t["logprobs"] or [])
            for t in sorted(traces, key=lambda t: t["timestamp"])
        ]
        return Export(merged(calls), sum(len(c[1]) for c in calls))


class AgentLightning(Peer):
    """agl-server: forwards chat, records events; a trainer asks for them as triplets."""

    name, module, probe = "Agent Lightning 1.0.2", "agentlightning", "/healthz"

    def command(self) -> list:
        return ["-m", "agentlightning.server", "host=127.0.0.1", f"port={self.port}",
                "default_proxy.model_name=tiny", "hydra.run.dir=/tmp"]  # fmt: skip

    async def start(self) -> None:
        await super().start()
        await self.post("/api/models", [{"model": "tiny", "endpoint": f"{self.engine}/v1"}])

    async def open(self, name: str) -> str:
        await self.post("/api/rollouts", [{"rollout_id": name, "data_id": name, "input": {}}])
        return f"{self.root}/proxy/rollout/{name}/attempt/0/mode/train/openai/v1"

    async def export(self, name: str) -> Export:
        events = await self.get(f"/api/rollouts/{name}/events?format=triplet")
        data = [e["data"] for e in events if e["data"].get("response_token_ids")]
        calls = [(d["prompt_token_ids"], d["response_token_ids"], d["response_log_probs"] or [])
                 for d in data]  # fmt: skip
        return Export(merged(calls), sum(len(c[1]) for c in calls))


class OpenEnv(Peer):
    """OpenEnv's capture server: forwards chat, links calls by prefix into sequences."""

    name, module = "OpenEnv capture 0.10.0", "openenv"

    def command(self) -> list:
        return ["-m", "openenv.core.harness.capture.server", "--llm-url", f"{self.engine}/v1",
                "--model", "tiny", "--engine", "vllm", "--port", self.port, "--capture-level",
                "tokens"]  # fmt: skip

    async def open(self, name: str) -> str:
        key = (await self.post("/sessions", {"session_id": name}))["session_id"]
        return f"{self.root.replace('//', f'//{key}@')}/v1"

    async def export(self, name: str) -> Export:
        found = await self.get(f"/sessions/{name}/rollout")
        rows = [
            Row(s["input_ids"], [bool(m) for m in s["loss_mask"]], s["logprobs"])
            for s in found["sequences"] if s["trainable"]
        ]  # fmt: skip
        return Export(rows, sum(t["n_sampled"] for t in found["turns"]), not found["trainable"])


class Verifiers(Peer):
    """verifiers' interception server with renderers: owns every prompt, as we do."""

    name, module, pattern, tokens_in = "verifiers 0.4.0", "verifiers", r"up: (\S+)", True

    def command(self) -> list:
        return [HERE / "peer_verifiers.py", self.engine, self.folder, self.port]

    async def open(self, name: str) -> str:
        return (await self.post("/open", {"name": name}))["url"]

    async def export(self, name: str) -> Export:
        found = await self.get(f"/export/{name}")
        return Export([Row(**row) for row in found["rows"]], found["accounted"])


class Litellm(Peer):
    """litellm's proxy: the latency reference. It records no tokens."""

    name, module, probe = "litellm proxy", "litellm.proxy.proxy_server", "/health/liveliness"

    def command(self) -> list:
        config = Path(tempfile.mkstemp(suffix=".yaml")[1])
        to = {"model": "openai/tiny", "api_base": f"{self.engine}/v1", "api_key": "x"}
        models = [{"model_name": "tiny", "litellm_params": to}]
        config.write_text(json.dumps({"model_list": models}))
        return ["-c", "from litellm import run_server; run_server()", "--config", config,
                "--host", "127.0.0.1", "--port", self.port, "--telemetry", "False"]  # fmt: skip

    async def open(self, name: str) -> str:
        return f"{self.root}/v1"


async def bearer(request: httpx.Request) -> None:
    """The user of a URL (http://KEY@host) is a key."""
    if request.url.username:
        request.headers["authorization"] = f"Bearer {request.url.username}"


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
