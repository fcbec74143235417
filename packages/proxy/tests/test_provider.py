"""A provider in place of an engine: ours, with a scripted engine, is one; so is a small server that
refuses, is busy, quotes keys and hangs up. Bodies go on as they are, secrets do not.
"""

import asyncio
import json
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from test_cli import COMMAND
from test_completions import complete
from test_http import CALL, USER, chat

from nanoswe_proxy import export
from nanoswe_proxy.app import create_app, serve
from nanoswe_proxy.engine.provider import Provider, noted
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.errors import EngineError
from nanoswe_proxy.log import read
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.state import replay
from nanoswe_proxy.trajectory import from_json, write_jsonl

SECRET = "sk-the-providers-own"


class Elsewhere:
    """Answers as `script` says, and keeps what came."""

    def __init__(self, *script):
        self.script, self.seen, self.left = list(script), [], asyncio.Event()
        route = Route("/v1/{path:path}", self.answer, methods=["GET", "POST"])
        self.app = Starlette(routes=[route])

    async def answer(self, request):
        self.seen.append((dict(request.headers), await request.body(), request.url.path))
        return self.script.pop(0)


class Idle:
    """What `serve` wants of a proxy."""

    root_url, connected = "", None


@asynccontextmanager
async def before(elsewhere, monkeypatch, logs=None):
    """A proxy before a server, and a client of it."""
    monkeypatch.setenv("NANOSWE_PROVIDER_KEY", SECRET)
    async with serve(Idle(), app=elsewhere.app) as url:
        proxy = Proxy(Provider(f"{url}/v1/"), None, logs)
        async with (
            serve(proxy, app=create_app(proxy)) as ours,
            httpx.AsyncClient(base_url=ours, timeout=30) as client,
        ):
            yield proxy, client
        await proxy.engine.client.aclose()


def text_of(answer):
    """What a streamed chat says."""
    chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [c["delta"] for chunk in chunks for c in json.loads(chunk)["choices"]]
    return "".join(d.get("content") or "" for d in deltas)


def test_a_provider_answers_and_is_noted(folders, monkeypatch, tmp_path):
    """Streamed and whole, chat and completions; what was said, and that nothing can train."""

    async def main():
        folder = folders["bpe"]
        theirs = Proxy(ScriptedEngine(folder, [CALL, "left é", "right", "of", "sum"]),
                       Renderer(folder), max_tokens=200)  # fmt: skip
        theirs_app = create_app(theirs)
        monkeypatch.setenv("NANOSWE_PROVIDER_KEY", SECRET)
        async with serve(theirs, app=theirs_app):
            provider = Provider(theirs.base_url(theirs.open("theirs")))
            proxy = Proxy(provider, None, tmp_path)
            transport = httpx.ASGITransport(create_app(proxy))
            async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
                cap = proxy.open("t.0")
                first = await chat(client, cap, model="m", n=1)
                assert first.status_code == 200 and "retry-after" not in first.headers
                message = first.json()["choices"][0]["message"]
                result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
                wired = [*USER, message, result | {"content": "1"}]
                more = {"stream": True, "stream_options": {"include_usage": True}}
                streamed = await chat(client, cap, wired, **more)
                assert text_of(streamed) == "left é" and "[DONE]" in streamed.text
                told = (await complete(client, cap, "of", logprobs=0)).json()["choices"][0]
                whole = {"input": "go", "stream": True}
                await client.post(f"/s/{cap}/v1/responses", json=whole)
                await complete(client, cap, "of", logprobs=0, stream=True)
                shown = from_json((await client.get(f"/sessions/{cap}")).text)
                assert shown.incomplete == ("not sealed",)
                trajectory = from_json((await client.post(f"/sessions/{cap}/seal")).text)
            await provider.client.aclose()
        (path,) = tmp_path.glob("*.log")
        assert export.trajectory(replay(read(path).records)).to_json() == trajectory.to_json()
        assert trajectory.samples == () and len(trajectory.turns) == 5
        assert {t.masked for t in trajectory.turns} == {"provider"}
        assert [t.delivery for t in trajectory.turns] == ["delivered"] * 5
        assert [t.finish_reason for t in trajectory.turns[:3]] == ["tool_calls", "stop", "stop"]
        truth = theirs.engine.log
        counts = [(t.prompt_tokens, t.sampled_tokens) for t in trajectory.turns]
        known = [(len(e.prompt), len(e.sampled)) for e in truth]
        assert counts == [*known[:4], (0, 0)]  # the last stream was not asked for usage
        assert trajectory.conservation.masked == {"provider": sum(n for _, n in counts)}
        assert trajectory.turns[0].requested == {"model": "m", "n": 1}
        calls = trajectory.calls
        assert [c["said"] for c in calls[:2]] == [
            [{"messages": m} for m in USER], [{"messages": m} for m in wired[2:]]
        ]  # fmt: skip
        assert [c["kept"] for c in calls[:3]] == [0, 2, 0] and calls[0]["status"] == 200
        assert calls[0]["reply"]["choices"][0]["message"] == message and calls[0]["seconds"] > 0
        assert calls[1]["reply"]["choices"][0]["content"] == "left é"
        assert calls[2]["reply"]["choices"][0]["logprobs"] == told["logprobs"]
        assert calls[3]["reply"]["output"][0]["content"][0]["text"] == "of"
        logged = calls[4]["reply"]["choices"][0]["logprobs_token_logprobs"]
        assert logged == [s.logprob for s in truth[4].sampled]
        kept = tmp_path / "kept.jsonl"
        write_jsonl(kept, trajectory)
        for how in ([], ["--json"], ["--parquet", tmp_path / "x"]):
            run = subprocess.run([*COMMAND, "export", kept, *how], capture_output=True, text=True)
            assert run.returncode == 2 and "t.0 was answered by a provider" in run.stderr
            assert run.stdout == "" and run.stderr.count("\n") == 1

    asyncio.run(main())


def test_bodies_go_on_as_they_are_and_secrets_do_not(monkeypatch, caplog, capfd):
    """Not a byte of the body changes, but for a capability in it; no header of the client goes on;
    a key that the provider quotes is struck out, and none of this is printed.
    """

    async def main():
        quoted = {"error": {"message": f"bad key {SECRET}", "code": "invalid_api_key"}}
        elsewhere = Elsewhere(JSONResponse({}), JSONResponse({}), JSONResponse(quoted, 401))
        async with before(elsewhere, monkeypatch) as (proxy, client):
            cap = proxy.open("t.0")
            body = (
                b'{ "messages":[{"role":"user","content":[{"type":"image_url"}]}],"\\u00e9": 1.50}'
            )
            theirs = {"authorization": f"Bearer {cap}", "cookie": "c", "x-api-key": cap,
                      "x-nanoswe-session": cap, "user-agent": "agent"}  # fmt: skip
            path = "/v1/chat/completions"
            assert (await client.post(path, content=body, headers=theirs)).status_code == 200
            inside = json.dumps({"nanoswe_session": cap, "messages": USER}).encode()
            assert (await client.post(path, content=inside)).status_code == 200
            refused = await client.post(f"/s/{cap}{path}", json={"messages": USER})
            assert (
                refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            )
            assert SECRET not in refused.text and "***" in refused.text
            assert [seen[1] for seen in elsewhere.seen[:2]] == [
                body, json.dumps({"messages": USER}).encode()
            ]  # fmt: skip
            for headers, raw, where in elsewhere.seen:
                assert headers["authorization"] == f"Bearer {SECRET}" and where == path
                assert cap not in str(headers) and cap.encode() not in raw
                assert not {"cookie", "x-api-key", "x-nanoswe-session"} & set(headers)
            trajectory = await proxy.seal(cap)
            assert SECRET not in trajectory.to_json() and cap not in trajectory.to_json()
            assert [t.stop for t in trajectory.turns] == ["stop", "stop", "aborted"]

    with caplog.at_level("DEBUG"):
        asyncio.run(main())
    assert SECRET not in caplog.text and SECRET not in "".join(capfd.readouterr())


def test_retry_after_is_honoured(monkeypatch):
    """Where the provider says for how long, the call waits; else, or too often, it is told."""

    async def main():
        waits = []

        async def sleep(seconds):
            waits.append(seconds)

        def busy(status=429, **headers):
            return JSONResponse({"error": {"message": "slow down"}}, status, headers=headers)

        soon = {"retry-after": "7"}
        script = [busy(**soon), busy(503, **{"retry-after": "900"}), JSONResponse({"choices": []}),
                  busy(**soon), busy(**soon), busy(**soon), busy(), busy(500, **soon)]  # fmt: skip
        async with before(Elsewhere(*script), monkeypatch) as (proxy, client):
            cap = proxy.open("t.0")
            with monkeypatch.context() as patched:
                patched.setattr(
                    "nanoswe_proxy.engine.provider.asyncio", SimpleNamespace(sleep=sleep)
                )
                answers = [await chat(client, cap) for _ in range(4)]
            assert [a.status_code for a in answers] == [200, 429, 429, 500]
            assert waits == [7, 60.0, 7, 7]
            assert [a.headers.get("retry-after") for a in answers] == [None, "7", None, "7"]
            assert answers[1].json()["error"]["message"] == "slow down"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("after", "least", "most"),
    [("7", 7, 7), ("in 30 seconds", 25, 30), ("30 seconds ago", 0, 0), ("soon", None, None),
     ("", None, None), ("-7", None, None), ("Mon, 01 Foo 2026 00:00:00 GMT", None, None),
     ("9" * 5000, 60, 60), ("Wed, 31 Dec 9999 23:59:59 GMT", 60, 60),
     ("Mon, 01 Jan 99999 00:00:00 GMT", None, None)],
)  # fmt: skip
def test_retry_after_may_be_a_date(monkeypatch, after, least, most):
    """As HTTP has it; in the past it is now, and what is neither is told to the client."""
    ahead = {"in 30 seconds": 30, "30 seconds ago": -30}.get(after)
    after = formatdate(time.time() + ahead, usegmt=True) if ahead else after

    async def main():
        waits = []

        async def sleep(seconds):
            waits.append(seconds)

        busy = JSONResponse({"error": {}}, 429, headers={"retry-after": after})
        script = [busy, JSONResponse({"choices": []})]
        async with before(Elsewhere(*script), monkeypatch) as (proxy, client):
            with monkeypatch.context() as patched:
                patched.setattr(
                    "nanoswe_proxy.engine.provider.asyncio", SimpleNamespace(sleep=sleep)
                )
                answer = await chat(client, proxy.open("t.0"))
            assert answer.status_code == (429 if least is None else 200)
            assert [least <= w <= most for w in waits] == ([] if least is None else [True])

    asyncio.run(main())


def test_a_provider_that_is_not_there_is_one_clear_error(monkeypatch):
    async def main():
        proxy = Proxy(Provider("http://127.0.0.1:9/v1"), None)
        transport = httpx.ASGITransport(create_app(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://p") as client:
            cap = proxy.open("t.0")
            for path in ("chat/completions", "messages", "completions", "responses"):
                answer = await client.post(f"/s/{cap}/v1/{path}", json={"messages": USER})
                assert answer.status_code == 502
                assert "127.0.0.1:9/v1: ConnectError" in answer.json()["error"]["message"]
            assert (await client.post(f"/s/{cap}/v1/messages", content=b"{")).status_code == 400
            trajectory = await proxy.seal(cap)
            assert [t.stop for t in trajectory.turns] == ["aborted"] * 4
            assert (await chat(client, cap)).status_code == 409

    asyncio.run(main())


def test_streams_that_break_off(monkeypatch, tmp_path):
    """The client leaves: the provider is told; the provider breaks off: so does the answer. What
    came until then is noted, and nothing counts as delivered.
    """

    async def main():
        left = asyncio.Event()

        async def endless():
            try:
                while True:
                    yield b'data: {"choices": [{"index": 0, "delta": {"content": "left "}}]}\n\n'
                    await asyncio.sleep(0.02)
            finally:
                left.set()

        async def broken():
            yield b'data: {"choices": [{"index": 0, "delta": {"content": "left"}}]}\n\n'
            raise ConnectionError

        kind = "text/event-stream"
        elsewhere = Elsewhere(StreamingResponse(endless(), media_type=kind),
                              StreamingResponse(broken(), media_type=kind))  # fmt: skip
        async with before(elsewhere, monkeypatch, tmp_path) as (proxy, client):
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/chat/completions", {"messages": USER, "stream": True}
            async with client.stream("POST", path, json=body) as answer:
                assert answer.headers["content-type"].startswith(kind)
                async for _ in answer.aiter_lines():
                    break
            await asyncio.wait_for(left.wait(), 10)
            told = (await client.post(path, json=body)).text
            assert "left" in told and "the provider broke off" in told
            await asyncio.sleep(0.1)
            trajectory = await proxy.seal(cap)
            assert [t.delivery for t in trajectory.turns] == ["aborted"] * 2
            said = [c["reply"]["choices"][0]["content"] for c in trajectory.calls]
            assert said[0].startswith("left ") and said[1] == "left"

    asyncio.run(main())


def test_a_call_that_a_crash_swallowed_is_named(monkeypatch, tmp_path):
    async def main():
        proxy = Proxy(Provider("http://127.0.0.1:9/v1"), None, tmp_path)
        cap = proxy.open("t.0")
        proxy.live(cap).session.foreign(0, requested={}, delivery="", finish="")
        again = Proxy(Provider("http://127.0.0.1:9/v1"), None, tmp_path)
        trajectory = await again.seal(cap)
        assert trajectory.incomplete == ("turn 0: lost in a crash",)

    asyncio.run(main())


@pytest.mark.parametrize(
    "raw",
    [b"", b"no", b"[]", b"5", b'{"choices": 5}', b'{"choices": [5]}', b'{"usage": "x"}',
     b"data: {}\n\ndata: 5\n", b'data: {"choices": [{}]}', b'data: {"choices": "ab"}', b"\xff",
     b'{"usage": {"prompt_tokens": "many"}}', b'data: {"response": 5}', b'{"choices": [[]]}'],
)  # fmt: skip
def test_whatever_is_answered_can_be_noted(raw):
    assert isinstance(noted(raw)["reply"], dict)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "https://user:pass@x/v1", "https://x/v1?k=1"]
)
def test_urls_that_are_none_or_hold_secrets(url):
    with pytest.raises(EngineError, match="NANOSWE_PROVIDER_KEY"):
        Provider(url)


def test_serve_a_provider(folders):
    """By the command, with no model folder; and what is given beside it that cannot be."""
    serving = [*COMMAND, "serve", "--provider", "http://127.0.0.1:9/v1", "--port", "0"]
    with subprocess.Popen(serving, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = server.stderr.readline().split()[-1]
            assert '"provider": "http://127.0.0.1:9/v1"' in server.stderr.readline()
            session = httpx.post(f"{url}/sessions", json={"trial_id": "t.0"}).json()
            answer = httpx.post(f"{session['base_url']}/chat/completions", json={"messages": USER})
            assert answer.status_code == 502
        finally:
            server.terminate()
            server.wait(10)
    for wrong in (["--engine", "scripted:x"], ["--tokenizer", str(folders["words"])]):
        run = subprocess.run([*serving, *wrong], capture_output=True, text=True)
        assert run.returncode == 2 and "--provider alone" in run.stderr
    assert sys.executable in COMMAND and Script
