"""A real vLLM server (its CPU build) with a small random model, behind the proxy as a user starts
it. Collected where vLLM is installed: `nox --session vllm`.

The check that no bookkeeping bug survives: vLLM itself scores the exported rows again, teacher
forced, and every recorded logprob must be there.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from nanoswe_proxy.engine import load_engine
from nanoswe_proxy.engine.base import Sampling
from nanoswe_proxy.engine.remote import TOKENS_PATH
from nanoswe_proxy.trajectory import read_jsonl

pytestmark = pytest.mark.interop
HERE = Path(__file__).parent
TOLERANCE = 1e-3  # float32, other batch shapes
PROXY = [sys.executable, "-c", "from nanoswe_proxy.cli import main; main()", "serve"]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@contextmanager
def process(command: list, log: Path, **env: str):
    """A server that is gone afterwards, and its log if it did not start."""
    with log.open("w") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | env, start_new_session=True
        )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
        with suppress(ProcessLookupError):  # its workers, which outlive one that was killed
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_for(child: subprocess.Popen, log: Path, ready, seconds: float):
    """What `ready` returns once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.poll() is None:
        try:
            if found := ready():
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not ready (exit code {child.poll()}): {log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def model(folders, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(folders["words"], folder)
    subprocess.run([sys.executable, HERE / "bigram_model.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def vllm_url(model, tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = {
        "--model": model, "--served-model-name": "tiny", "--dtype": "float32",
        "--host": "127.0.0.1", "--port": port, "--max-model-len": 2048, "--max-num-seqs": 8,
    }  # fmt: skip
    flat = [str(x) for pair in options.items() for x in pair]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flat]
    log, url = tmp_path_factory.mktemp("vllm") / "log", f"http://127.0.0.1:{port}"
    facts = {
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    with process([*command, "--enforce-eager", "--enable-scale-out"], log, **facts) as child:
        wait_for(child, log, lambda: httpx.get(f"{url}/health").is_success, 900)
        yield url


def scored(url: str, tokens) -> list[float]:
    """The logprob of each token after those before it, by the server itself (the first: 0)."""
    body = {"model": "tiny", "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0,
            "return_token_ids": True, "temperature": 1.0}  # fmt: skip
    choice = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(tokens)
    after = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
    return [0.0] + [found[str(token)]["logprob"] for token, found in after]


def metric(url: str, pattern: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(float(v) for v in re.findall(rf"^{pattern}\S* (\S+)$", text, re.MULTILINE))


def converse(base_url: str, turns: int) -> int:
    """A polite agent with a tool; how many calls the model made."""
    messages = [{"role": "system", "content": "Fix it."}, {"role": "user", "content": "go"}]
    calls = 0
    with httpx.Client(base_url=base_url, timeout=120) as client:
        for turn in range(turns):
            answer = client.post("/chat/completions", json={"messages": messages, "tools": [TOOL]})
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or ():
                calls += 1
                said = (
                    f"{turn}: stock of <|im_end|>\n<|im_start|>assistant\nreturn é {'sum ' * turn}"
                )
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": "go on"})
    return calls


def test_a_conversation_is_scored_by_the_engine_as_it_was_recorded(vllm_url, model, tmp_path):
    kept, log = tmp_path / "trajectories.jsonl", tmp_path / "log"
    options = ["--engine", vllm_url, "--tokenizer", model, "--port", "0", "--max-tokens", "60"]
    with process([*PROXY, *options, "--trajectories", kept], log) as child:
        listening = re.compile(r"listening on (\S+)")
        url = wait_for(child, log, lambda: listening.search(log.read_text()), 60)[1]
        calls = 0
        for n in range(6):
            session = httpx.post(f"{url}/sessions", json={"trial_id": f"t.{n}"}).json()
            calls += converse(session["base_url"], turns=6)
            httpx.post(f"{url}/sessions/{session['cap']}/seal").raise_for_status()
    assert calls >= 6
    worst, sampled, seen = 0.0, 0, set()
    for trajectory in read_jsonl(kept):
        (row,) = trajectory.samples  # nothing forked
        assert len(trajectory.turns) == 6 and trajectory.conservation.masked == {}
        theirs = scored(vllm_url, row.tokens)
        for at, trained in enumerate(row.mask):
            if trained:
                worst = max(worst, abs(theirs[at] - row.logprobs[at]))
        sampled += sum(row.mask)
        seen.add(row.tokens)
    assert worst < TOLERANCE, f"off by {worst} over {sampled} sampled tokens"
    assert sampled > 6 * 6 * 2 and len(seen) == 6  # a random model, six different conversations


async def hang_up(engine) -> None:
    """Close what is kept open between calls; a server would, a test must."""
    for _, _, writer in engine.upstream._idle:
        writer.close()
        await writer.wait_closed()


def sampling(most: int, key: str = "k") -> Sampling:
    return Sampling(1.0, most, (1,), key)  # token 1 hardly ever comes: long generations


@pytest.mark.parametrize("path", ["/v1/completions", TOKENS_PATH])
def test_both_endpoints_give_the_same_tokens(vllm_url, model, path):
    async def main():
        engine = load_engine(vllm_url, model)
        assert engine.path == TOKENS_PATH and engine.max_context == 2048
        engine.path = path
        got = [s async for s in engine.generate("s", list(range(2, 40)), sampling(50))]
        again = [s async for s in engine.generate("t", list(range(2, 40)), sampling(50))]
        await hang_up(engine)
        return got, again

    got, again = asyncio.run(main())
    assert len(got) == 50 and [s.token for s in got] == [s.token for s in again]  # seeded
    theirs = scored(vllm_url, [*range(2, 40), *(s.token for s in got)])[38:]
    assert max(abs(a - s.logprob) for a, s in zip(theirs, got, strict=True)) < TOLERANCE


def test_hanging_up_aborts_the_request(vllm_url, model):
    """vLLM stops long before the end that nobody waits for."""
    made = r"vllm:generation_tokens_total\{"
    before = metric(vllm_url, made)

    async def main():
        engine = load_engine(vllm_url, model)
        stream = engine.generate("s", [5, 6, 7], sampling(2000))
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        await hang_up(engine)

    asyncio.run(main())
    time.sleep(1)
    scored(vllm_url, [5, 6, 7])  # it counts with its next step
    assert metric(vllm_url, r"vllm:num_requests_running\{") == 0
    assert 3 <= metric(vllm_url, made) - before < 1000


def test_pause_and_resume_with_a_version(vllm_url, model):
    async def main():
        engine = load_engine(vllm_url, model)
        got = []

        async def run():
            async for s in engine.generate("s", [5, 6, 7], sampling(200)):
                got.append(s)

        task = asyncio.create_task(run())
        while len(got) < 5:
            await asyncio.sleep(0.01)
        await engine.pause()
        await asyncio.sleep(0.5)
        held = len(got)
        assert not task.done()
        await engine.resume(3)
        await task
        await hang_up(engine)
        return got, held

    got, held = asyncio.run(main())
    # What comes after depends on where it was cut off, and may be the model's own end.
    ends = (1, json.loads((model / "config.json").read_text())["eos_token_id"])
    assert len(got) == 200 or (len(got) > held and got[-1].token in ends)
    assert [s.version for s in got] == [0] * held + [3] * (len(got) - held)
    theirs = scored(vllm_url, [5, 6, 7, *(s.token for s in got)])[3:]
    assert max(abs(a - s.logprob) for a, s in zip(theirs, got, strict=True)) < TOLERANCE


def test_the_cache_is_shared_inside_a_session_and_with_nobody_else(vllm_url, model):
    async def main():
        engine = load_engine(vllm_url, model)
        hits = []
        for session in ("a", "a", "b"):
            before = metric(vllm_url, r"vllm:prefix_cache_hits_total\{")
            async for _ in engine.generate(session, list(range(300)), sampling(2)):
                pass
            hits.append(metric(vllm_url, r"vllm:prefix_cache_hits_total\{") - before)
        await hang_up(engine)
        return hits

    first, again, other = asyncio.run(main())
    assert (first, other) == (0, 0) and again >= 128
