"""What a system adds to the engine: time by context, time of its loop, memory, work per turn.

In: a system before a zero-delay engine. Out: plain numbers. The direct arm asks the same engine, by
the same client, in the form in which the system asks it: token ids (ours) or chat (those that
forward chat); requests of both arms alternate, bodies are made before the clock starts. Processor
time of the server per request stands beside wall time: a busy machine moves it less.
"""

import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import httpx
from conftest import TEXT

CONTEXTS = {"1k": 1_000, "8k": 8_000, "32k": 32_000, "128k": 128_000}
REPEATS = 21


async def latency(system, rig_url: str, folder: Path, http: httpx.AsyncClient) -> dict:
    one_core(system.process.child.pid)
    # memory first: what the rest frees would hide it
    found: dict = {"load before": round(os.getloadavg()[0], 1)}
    found |= await memory(system, http) if hasattr(system, "export") else {}
    for name, tokens in CONTEXTS.items():
        found |= await added(system, rig_url, http, name, tokens)
    return found | await loop_lag(system, http)


def text_of(tokens: int) -> str:
    """About so many tokens of the benchmark's small vocabulary."""
    line = TEXT[0] + "\n"
    return line * max(1, tokens // 9)


async def added(system, rig_url: str, http, name: str, tokens: int) -> dict:
    base_url = await system.open(f"latency-{name}")
    history = [{"role": "system", "content": "S"}, {"role": "user", "content": text_of(tokens)}]
    through: list[float] = []
    direct: list[float] = []
    spent: list[float] = []
    size = 0
    for n in range(REPEATS + 3):
        body = json.dumps({"model": "tiny", "messages": history, "max_tokens": 20}).encode()
        if system.tokens_in:
            ids = json.dumps([5 + i % 200 for i in range(size or tokens)])
            how = '{"max_tokens": 20, "logprobs": 0}'
            direct_body = f'{{"token_ids": {ids}, "sampling_params": {how}, "stream": true}}'
            path = "/inference/v1/generate"
        else:
            direct_body, path = body, "/v1/chat/completions"
        used = cpu(system.process.child.pid)
        seconds, answer = await timed(http, f"{base_url}/chat/completions", body)
        message = answer.json()["choices"][0]["message"]
        size = answer.json()["usage"]["prompt_tokens"]
        used = cpu(system.process.child.pid) - used
        bare, _ = await timed(http, f"{rig_url}{path}", direct_body)
        if n >= 3:  # the first have to read the whole prompt, whoever serves them
            through.append(seconds)
            direct.append(bare)
            spent.append(used)
        history += [{"role": "assistant", "content": message["content"]},
                    {"role": "user", "content": f"more {n}"}]  # fmt: skip
    differences = sorted(a - b for a, b in zip(through, direct, strict=True))
    return {
        f"added p50, {name}": ms(statistics.median(differences)),
        f"added p99, {name}": ms(differences[-1]),
        f"direct p50, {name}": ms(statistics.median(direct)),
        f"server's processor time, {name}": ms(statistics.median(spent)),
    }


async def timed(http, url: str, body) -> tuple[float, httpx.Response]:
    began = time.perf_counter()
    answer = await http.post(url, content=body, headers={"content-type": "application/json"})
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return seconds, answer


async def memory(system, http) -> dict:
    """Bytes kept per token of four long sessions, and the work of early and late turns."""
    process = system.process
    turns, sessions = 60, 4
    warm = [{"role": "user", "content": text_of(20_000)}]  # what any first request leaves behind
    for n in range(8):
        body = {"model": "tiny", "messages": warm, "max_tokens": 20}
        await http.post(f"{await system.open(f'warm-{n}')}/chat/completions", json=body)
    urls = [await system.open(f"memory-{n}") for n in range(sessions)]
    histories = [[{"role": "user", "content": f"{n}"}] for n in range(sessions)]
    await asyncio.sleep(0.5)
    before, half, tokens, marks = process.memory(), 0, 0, []
    for turn in range(turns):
        used = cpu(process.child.pid)
        for url, history in zip(urls, histories, strict=True):
            body = {"model": "tiny", "messages": history, "max_tokens": 20}
            answer = (await http.post(f"{url}/chat/completions", json=body)).json()
            said = answer["choices"][0]["message"]["content"]
            history += [{"role": "assistant", "content": said},
                        {"role": "user", "content": f"{turn} {text_of(500)}"}]  # fmt: skip
            if turn == turns - 1:
                tokens += answer["usage"]["total_tokens"]
        marks.append((cpu(process.child.pid) - used) / sessions)
        half = process.memory() if turn == turns // 2 else half
    after = process.memory()
    return {
        "memory per token, bytes": round((after - before) / tokens, 1),
        "of it in the first half": f"{100 * (half - before) / max(1, after - before):.0f} %",
        "processor time of turns 1-10": ms(statistics.mean(marks[:10])),
        "processor time of turns 51-60": ms(statistics.mean(marks[-10:])),
    }


async def loop_lag(system, http) -> dict:
    """How long a trivial request waits while eight prompts of 128k tokens arrive at once."""
    probe = system.root + system.probe
    if hasattr(system, "caps"):  # on the event loop, wherever health is answered
        probe = f"{await system.open('lag')}/models"
    bodies = []
    for n in range(8):
        messages = [{"role": "user", "content": f"{n} {text_of(128_000)}"}]
        url = await system.open(f"lag-{n}")
        bodies.append((url, json.dumps({"messages": messages, "model": "tiny", "max_tokens": 9})))
    idle = [(await timed_get(http, probe)) for _ in range(50)]
    tasks = [
        asyncio.create_task(timed(http, f"{url}/chat/completions", body)) for url, body in bodies
    ]
    waits: list[float] = []
    async with httpx.AsyncClient(timeout=60, event_hooks=http.event_hooks) as own:
        while not all(t.done() for t in tasks):
            waits.append(await timed_get(own, probe))
            await asyncio.sleep(0.005)
    for task in tasks:
        task.result()
    waits.sort()
    return {
        "loop lag p99, 8 x 128k": ms(waits[int(0.99 * (len(waits) - 1))]),
        "loop lag worst": ms(waits[-1]),
        "idle": ms(statistics.median(idle)),
    }


async def timed_get(http, url: str) -> float:
    began = time.perf_counter()
    (await http.get(url)).raise_for_status()
    return time.perf_counter() - began


def one_core(pid: int) -> None:
    """The server has a core to itself; this client and the engine share the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(pid, cores[:1])
        for other in (0, *children(pid)):
            os.sched_setaffinity(other, cores[1:])


def children(but: int) -> list[int]:
    """Processes of ours other than `but`."""
    mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(p) for p in mine if int(p) != but]


def cpu(pid: int) -> float:
    """Processor seconds of a process so far, all of its threads."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(t.read_text().split()[0]) for t in threads) / 1e9


def ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
