"""Many agents before one proxy process, while everything fails at random: engines answer 503 or
break off, clients hang up, the proxy is killed (-9) and started again.

In: a model folder, numbers. Out: a `Report` of facts, after every row of every session was compared
with what the engine itself noted. `python soak.py [SESSIONS TURNS KILLS]` prints the report.
"""

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import httpx
from engine_server import Server
from starlette.responses import JSONResponse

from nanoswe_proxy.app import serve
from nanoswe_proxy.engine.base import Sampled
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.errors import EngineError
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.render.template import Template
from nanoswe_proxy.trajectory import Trajectory, from_json

PROXY = [sys.executable, "-c", "from nanoswe_proxy.cli import main; main()", "serve"]
WORDS = "left right return the quick brown fox sum of width é 日本 🙂".split()
REFUSES, BREAKS, HANGS_UP, GOES_BACK = 0.02, 0.02, 0.05, 0.02  # of requests, or of turns
PATIENCE = 400  # tries of one request


@dataclass
class Report:
    sessions: int
    turns: int
    seconds: float = 0.0
    engine_calls: int = 0
    refused_by_engine: int = 0
    broken_off_by_engine: int = 0
    hung_up: int = 0
    tries: int = 0
    kills: int = 0
    recovery_sec: list[float] = field(default_factory=list)
    rows: int = 0
    forks: Counter = field(default_factory=Counter)
    sampled: int = 0
    trained: int = 0
    masked: Counter = field(default_factory=Counter)
    lost_calls_named: int = 0
    log_bytes_per_token: float = 0.0
    mib_before: float = 0.0
    mib_most: float = 0.0
    mib_sealed: list[float] = field(default_factory=list)  # after each wave


class _Nothing(list):
    """The log of an engine that keeps another."""

    def append(self, entry) -> None:
        pass


class Truth(ScriptedEngine):
    """Notes of each call: the digest of its prompt, and what was sampled. Breaks off at times."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, self._say, max_context=400_000)
        self.log = _Nothing()
        self.noted: dict[str, list[tuple[bytes, list[Sampled]]]] = {}
        self.dice, self.breaks = random.Random(seed), BREAKS
        self.broken = 0

    def _say(self, session, ids, how) -> Script:
        said = " ".join(self.dice.choices(WORDS, k=self.dice.randint(1, 5)))
        if self.dice.random() < 0.7:
            call = {"name": "bash", "arguments": {"command": f"cat {said}"}}
            said = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        broken = self.dice.randrange(9) if self.dice.random() < self.breaks else None
        wait = self.dice.random() / 50 if self.dice.random() < 0.3 else 0.0
        return Script(said, split_seed=self.dice.randrange(99), fail_after=broken, delay_sec=wait)

    async def generate(self, session, ids, sampling) -> AsyncIterator[Sampled]:
        sampled: list[Sampled] = []
        prompt = array("I", ids).tobytes()
        self.noted.setdefault(session, []).append((hashlib.blake2b(prompt).digest(), sampled))
        try:
            async for s in super().generate(session, ids, sampling):
                sampled.append(s)
                yield s
        except EngineError:
            self.broken += 1
            raise


class Faulty(Server):
    """An engine's server that is busy at times."""

    refused = 0

    async def tokens(self, request):
        if await request.body() != b"{}" and self.engine.dice.random() < REFUSES:
            self.refused += 1
            return JSONResponse({"error": {"message": "busy"}}, 503)
        return await super().tokens(request)


class Proxy:
    """The process, on one port, with one folder of logs for all its lives."""

    def __init__(self, engine: str, folder: Path, at: Path) -> None:
        self.engine, self.folder, self.at, self.port = engine, folder, at, 0
        self.said = at / "said"

    async def start(self) -> float:
        """Seconds until it answers."""
        began = time.perf_counter()
        options = ["--engine", self.engine, "--tokenizer", self.folder, "--port", self.port,
                   "--max-tokens", 400, "--logs", self.at / "logs"]  # fmt: skip
        with self.said.open("a") as out:
            command = [*PROXY, *map(str, options)]
            self.child = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        while self.child.returncode is None:
            if self.port == 0 and "listening" in self.said.read_text():
                self.port = int(re.findall(r"listening on \S+:(\d+)", self.said.read_text())[-1])
            try:
                async with httpx.AsyncClient() as http:
                    (await http.get(f"{self.url}/healthz")).raise_for_status()
                return time.perf_counter() - began
            except (httpx.HTTPError, httpx.InvalidURL):
                await asyncio.sleep(0.02)
        raise AssertionError(self.said.read_text()[-3000:])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port or 1}"

    async def stop(self, how: int = signal.SIGTERM) -> None:
        self.child.send_signal(how)
        await self.child.wait()

    def mib(self) -> float:
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


class Walker:
    """An agent that never gives up, and hangs up at times."""

    def __init__(self, http: httpx.AsyncClient, base_url: str, seed: int, report: Report) -> None:
        self.http, self.url = http, f"{base_url}/chat/completions"
        self.dice, self.report = random.Random(seed), report
        self.history: list[dict] = [
            {"role": "system", "content": f"Fix bug {seed}."}, {"role": "user", "content": "go"}
        ]  # fmt: skip

    async def walk(self, turns: int) -> None:
        for turn in range(turns):
            reply = await self.ask()
            self.history.append(reply)
            calls = reply.get("tool_calls") or []
            said = f"{turn}: <|im_end|> {' '.join(self.dice.choices(WORDS, k=9))}"
            self.history += [{"role": "tool", "tool_call_id": c["id"], "content": said}
                             for c in calls] or [{"role": "user", "content": said}]  # fmt: skip
            if self.dice.random() < GOES_BACK and len(self.history) > 12:
                at = [i for i, m in enumerate(self.history) if m["role"] == "assistant"]
                del self.history[self.dice.choice(at[-4:]) :]
                self.history.append({"role": "user", "content": f"otherwise, {turn}"})
        self.history.append(await self.ask())

    async def ask(self) -> dict:
        body = {"model": "p", "messages": self.history, "stream": self.dice.random() < 0.5}
        for _ in range(PATIENCE):
            self.report.tries += 1
            short = self.dice.random() < HANGS_UP
            try:
                async with asyncio.timeout(self.dice.random() / 20 if short else 60):
                    if reply := await self._once(body):
                        return reply
            except (TimeoutError, httpx.TransportError):
                self.report.hung_up += short
                await asyncio.sleep(0.05)
        raise AssertionError(f"no reply after {PATIENCE} tries")

    async def _once(self, body: dict) -> dict | None:
        """The reply, or nothing where the server failed."""
        if not body["stream"]:
            answer = await self.http.post(self.url, json=body)
            assert answer.status_code in (200, 500, 502, 503), answer.text
            return answer.json()["choices"][0]["message"] if answer.status_code == 200 else None
        message: dict = {"role": "assistant", "content": ""}
        async with self.http.stream("POST", self.url, json=body) as answer:
            assert answer.status_code in (200, 500, 502, 503), answer.status_code
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return message
                if line.startswith("data:") and not fold(message, json.loads(line[5:])):
                    return None
        return None


def fold(message: dict, event: dict) -> bool:
    """Add a chunk to the message; False if it tells of an error."""
    for choice in event.get("choices", ()):
        message["content"] += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({k: v for k, v in part.items() if k != "index"})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return "error" not in event


def check(trajectory: Trajectory, noted: list, history: list[dict], folder: Path) -> None:
    """Every trained call is one that the engine noted, once; every noted call is a turn; the
    longest row says what the agent's history says.
    """
    left = Counter((d, tuple((s.token, s.logprob) for s in sampled)) for d, sampled in noted)
    for row in trajectory.samples:
        at = 0
        while at < len(row.turns):
            end = at + 1
            if row.turns[at] >= 0:
                while end < len(row.turns) and row.turns[end] == row.turns[at]:
                    end += 1
                digest = hashlib.blake2b(array("I", row.tokens[:at]).tobytes()).digest()
                said = tuple(zip(row.tokens[at:end], row.logprobs[at:end], strict=True))
                assert left[digest, said] > 0, f"the engine never sampled turn {row.turns[at]}"
                left[digest, said] -= 1
            at = end
    assert len(noted) <= len(trajectory.turns), "calls are missing"
    lost = [t for t in trajectory.turns if t.stop == "lost"]
    assert len(trajectory.incomplete) == len(lost)
    assert set(trajectory.conservation.masked) <= {"aborted", "undelivered"}
    decode = Renderer(folder).codec.full.decode
    for m in history:
        for call in m.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    wanted = Template(folder).render(history, None, False).rstrip("\n")
    rows = [decode(row.tokens, skip_special_tokens=False) for row in trajectory.samples]
    assert wanted in rows, "no row says what the agent heard"


async def soak(folder: Path, at: Path, sessions: int, turns: int, kills: int, seed: int = 1,
               waves: int = 0) -> Report:  # fmt: skip
    """Walk, seal, compare. `waves`: as often again, with an eighth of the agents and no kills, for
    the memory of a process that goes on.
    """
    report, began = Report(sessions, turns), time.perf_counter()
    truth = Truth(folder, seed)
    server = Faulty(truth, Renderer(folder).stop_ids, tokens_path=True)
    async with serve(SimpleNamespace(), app=server.app()) as url:
        proxy = Proxy(url, folder, at)
        await proxy.start()
        report.mib_before = proxy.mib()
        await _wave(report, truth, proxy, sessions, turns, kills, seed)
        for n in range(waves):
            await _wave(report, truth, proxy, max(1, sessions // 8), turns, 0, seed + n + 1)
        await proxy.stop()
    report.refused_by_engine, report.broken_off_by_engine = server.refused, truth.broken
    report.log_bytes_per_token = round(
        sum(p.stat().st_size for p in (at / "logs").glob("*.log")) / max(1, report.sampled), 1
    )
    report.seconds = round(time.perf_counter() - began, 1)
    return report


async def _wave(report: Report, truth: Truth, proxy: Proxy, sessions: int, turns: int, kills: int,
                seed: int) -> None:  # fmt: skip
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=sessions)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        walkers = {}
        for n in range(sessions):
            opened = await http.post(f"{proxy.url}/sessions", json={"trial_id": f"t.{seed}.{n}"})
            cap, url = opened.json()["cap"], opened.json()["base_url"]
            walkers[cap] = Walker(http, url, 1000 * seed + n, report)
        tasks = [asyncio.create_task(w.walk(turns)) for w in walkers.values()]
        watching = asyncio.create_task(_watch(report, proxy))
        calls_before = sum(map(len, truth.noted.values()))
        for kill in range(kills):
            due = calls_before + sessions * turns * (kill + 1) // (kills + 1)
            while sum(map(len, truth.noted.values())) < due and not all(t.done() for t in tasks):
                await asyncio.sleep(0.05)
            await proxy.stop(signal.SIGKILL)
            report.kills += 1
            report.recovery_sec.append(round(await proxy.start(), 2))
        await asyncio.gather(*tasks)
        watching.cancel()
        for cap, walker in walkers.items():
            answer = await http.post(f"{proxy.url}/sessions/{cap}/seal")
            trajectory = from_json(answer.raise_for_status().text)
            noted = truth.noted.pop(hashlib.blake2s(cap.encode(), digest_size=16).hexdigest())
            check(trajectory, noted, walker.history, proxy.folder)
            report.engine_calls += len(noted)
            report.rows += len(trajectory.samples)
            report.forks.update(t.fork for t in trajectory.turns if t.fork)
            report.sampled += trajectory.conservation.sampled
            report.trained += trajectory.conservation.trained
            report.masked.update(trajectory.conservation.masked)
            report.lost_calls_named += len(trajectory.incomplete)
    report.mib_sealed.append(proxy.mib())


async def _watch(report: Report, proxy: Proxy) -> None:
    while True:
        with suppress(OSError):  # between two lives
            report.mib_most = max(report.mib_most, proxy.mib())
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    from conftest import _bpe

    logging.disable(logging.CRITICAL)  # the server's own account of connections that break
    with tempfile.TemporaryDirectory() as folder:
        _bpe().save(f"{folder}/tokenizer.json")
        counts = [int(a) for a in sys.argv[1:]] or [64, 200, 5]
        done = asyncio.run(soak(Path(folder), Path(folder), *counts, waves=4))
    sys.stdout.write(json.dumps(vars(done), indent=1) + "\n")
