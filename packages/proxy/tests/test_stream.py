"""Streams: real ones, equal to the whole reply, ended only by a committed node; and what becomes of
calls whose client or whose proxy dies.
"""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import pytest

from nanoswe_proxy.app import serve
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.log import read
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.state import replay
from nanoswe_proxy.trajectory import from_json

CALL = 'so\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat 🦊"}}\n</tool_call>'
USER = [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]
COMMAND = [sys.executable, "-c", "from nanoswe_proxy.cli import main; main()"]


@asynccontextmanager
async def running(folder, scripts, logs=None):
    engine = ScriptedEngine(folder, scripts, max_context=2000)
    proxy = Proxy(engine, Renderer(folder), logs, max_tokens=200)
    async with serve(proxy) as url, httpx.AsyncClient(base_url=url) as client:
        yield proxy, client


def frames(text):
    """The data of server-sent events."""
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]


def folded(chunks):
    """The message that chunks add up to."""
    message = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append(
                        {
                            "id": part["id"],
                            "type": "function",
                            "function": {"name": part["function"]["name"], "arguments": ""},
                        }
                    )
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("said", [CALL, "left 🦊 right", "<tool_call>\n{broken", ""])
def test_a_stream_adds_up_to_the_whole_reply(folder, said, seed):
    async def main():
        async with running(folder, [Script(said, split_seed=seed)] * 2) as (proxy, client):
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/chat/completions", {"messages": USER, "model": "m"}
            whole = (await client.post(path, json=body)).json()
            wanted = body | {"stream": True, "stream_options": {"include_usage": True}}
            answer = await client.post(path, json=wanted)
            assert answer.headers["content-type"].startswith("text/event-stream")
            *data, last = frames(answer.text)
            chunks = [json.loads(d) for d in data]
            assert last == "[DONE]" and chunks[-1]["usage"] == whole["usage"]
            assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
            message = folded(chunks)
            expected = whole["choices"][0]["message"] | {"content": message["content"]}
            assert (whole["choices"][0]["message"]["content"] or "") == message["content"]
            for call in [*expected.get("tool_calls", []), *message.get("tool_calls", [])]:
                assert call.pop("id").startswith("call")
            assert message == expected
            trajectory = await proxy.seal(cap)
            assert trajectory.conservation.trained == trajectory.conservation.sampled

    asyncio.run(main())


class Slow(ScriptedEngine):
    """Waits after every token."""

    async def generate(self, session, ids, sampling):
        async for sampled in super().generate(session, ids, sampling):
            yield sampled
            await asyncio.sleep(0.1)


def test_tokens_leave_as_they_are_sampled(folders):
    async def main():
        folder = folders["words"]
        engine = Slow(folder, ["left right left right"])
        proxy = Proxy(engine, Renderer(folder))
        async with serve(proxy) as url, httpx.AsyncClient(base_url=url) as client:
            cap, seen, sampled = proxy.open("t.0"), "", []
            body = {"messages": USER, "stream": True}
            async with client.stream("POST", f"/s/{cap}/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        delta = json.loads(line[6:])["choices"][0]["delta"]
                        seen += delta.get("content") or ""
                        sampled.append(len(engine.log[0].sampled))
            assert seen == "left right left right"
            assert sampled[0] <= 2 and sampled[-1] == 8 and len(set(sampled)) > 3

    asyncio.run(main())


def test_a_stream_that_its_client_leaves_is_aborted(folders):
    async def main():
        slow = Script("left", delay_sec=0)
        async with running(folders["words"], lambda *_: slow) as (proxy, client):
            engine, released = proxy.engine, asyncio.Event()
            whole = engine.generate

            async def generate(session, ids, sampling):
                try:
                    async for sampled in whole(session, ids, sampling):
                        yield sampled
                        await asyncio.sleep(30)
                finally:
                    released.set()

            engine.generate = generate
            cap = proxy.open("t.0")
            body = {"messages": USER, "stream": True}
            async with client.stream("POST", f"/s/{cap}/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
            await asyncio.wait_for(released.wait(), 5)
            await asyncio.sleep(0.05)
            trajectory = await proxy.seal(cap)
            assert trajectory.turns[0].delivery == "aborted"
            assert trajectory.conservation.masked == {"aborted": 1}

    asyncio.run(main())


def test_engine_failures_before_and_in_a_stream(folders):
    async def main():
        scripts = [Script("left", fail_after=0), Script("left right", fail_after=2), "ok"]
        proxy = Proxy(Slow(folders["words"], scripts), Renderer(folders["words"]))
        async with serve(proxy) as url, httpx.AsyncClient(base_url=url) as client:
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/chat/completions", {"messages": USER, "stream": True}
            before = await client.post(path, json=body)
            assert before.status_code == 502
            inside = await client.post(path, json=body)
            assert inside.status_code == 200 and "[DONE]" not in inside.text
            assert json.loads(frames(inside.text)[-1])["error"]["code"] == "engine_error"
            assert frames((await client.post(path, json=body)).text)[-1] == "[DONE]"
            trajectory = await proxy.seal(cap)
            assert [t.delivery for t in trajectory.turns] == ["aborted", "aborted", "delivered"]

    asyncio.run(main())


@pytest.mark.parametrize("stop", ["</x", ["ht", "zz"], "right"])
def test_a_stop_string_ends_the_text_and_not_the_record(folder, stop):
    """Served text ends before it, the ids stay; the next turn goes on from all of them."""
    said = "left </x right sum"
    ended = said[: said.index(stop if isinstance(stop, str) else stop[0])]

    async def main():
        scripts = [Script(said, split_seed=1), Script(said, split_seed=1), "done"]
        async with running(folder, scripts) as (proxy, client):
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/chat/completions", {"messages": USER, "stop": stop}
            whole = (await client.post(path, json=body)).json()["choices"][0]
            assert whole["finish_reason"] == "stop" and whole["message"]["content"] == ended
            streamed = await client.post(path, json=body | {"stream": True, "x": 1})
            assert folded(map(json.loads, frames(streamed.text)[:-1]))["content"] == ended
            messages = [*USER, whole["message"], {"role": "user", "content": "on"}]
            await client.post(path, json={"messages": messages})
            first, _, last = proxy.engine.log
            ids = tuple(s.token for s in first.sampled)
            whole_text = proxy.renderer.codec.decode(ids)
            assert ended in whole_text and whole_text != ended
            assert last.prompt[: len(first.prompt) + len(ids)] == first.prompt + ids
            trajectory = await proxy.seal(cap)
            assert [t.stop for t in trajectory.turns] == ["stop_string", "stop_string", "stop"]
            assert trajectory.samples[-1].provenance.count("y") == 1
            assert trajectory.conservation.masked == {}

    asyncio.run(main())


@pytest.mark.parametrize("echoed", [True, False])
def test_reasoning_may_be_echoed_or_dropped(folder, echoed):
    async def main():
        scripts = ["<think>\nhm\n</think>\n\nleft", "right"]
        async with running(folder, scripts) as (proxy, client):
            cap = proxy.open("t.0")
            path = f"/s/{cap}/v1/chat/completions"
            said = (await client.post(path, json={"messages": USER})).json()["choices"][0][
                "message"
            ]
            if "reasoning_content" in said and not echoed:
                del said["reasoning_content"]
            messages = [*USER, said, {"role": "user", "content": "on"}]
            await client.post(path, json={"messages": messages})
            trajectory = await proxy.seal(cap)
            assert [t.fork for t in trajectory.turns] == ["", ""]
            assert len(trajectory.samples) == 1

    asyncio.run(main())


def test_headers_that_speak_of_a_retry_are_believed(folders):
    async def main():
        async with running(folders["words"], ["left", "right", "sum", "cat"]) as (proxy, client):
            cap = proxy.open("t.0")

            async def ask(**headers):
                path = f"/s/{cap}/v1/chat/completions"
                answer = await client.post(path, json={"messages": USER}, headers=headers)
                return answer.json()["choices"][0]["message"]["content"]

            key = {"idempotency-key": "k"}
            assert [await ask(**key), await ask(**key)] == ["left", "left"]
            assert await ask(**{"idempotency-key": "other"}) == "right"
            again = {"x-stainless-retry-count": "1"}  # of which of the two?
            assert await ask(**again) == "sum"
            assert await ask(**{"x-stainless-retry-count": "0"}) == "cat"
            other = proxy.open("t.1")
            first = await client.post(f"/s/{other}/v1/chat/completions", json={"messages": USER})
            retried = await client.post(
                f"/s/{other}/v1/chat/completions", json={"messages": USER}, headers=again
            )
            assert first.json() == retried.json()  # there is but one that it can be
            assert len((await proxy.seal(cap)).turns) == 4

    asyncio.run(main())


@pytest.mark.parametrize("where", ["bearer", "x-api-key", "header", "body"])
def test_a_session_without_a_path(folders, where):
    async def main():
        async with running(folders["words"], ["left", "right"]) as (proxy, client):
            cap = proxy.open("t.0")
            headers = {
                "bearer": {"Authorization": f"Bearer {cap}"},
                "x-api-key": {"x-api-key": cap},
                "header": {"x-nanoswe-session": cap},
            }.get(where, {})
            body = {"messages": USER} | ({"nanoswe_session": cap} if where == "body" else {})
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
            models = await client.get("/v1/models", headers=headers)
            assert models.status_code == (404 if where == "body" else 200)
            assert (await client.post("/v1/chat/completions", json={})).status_code == 404
            # an SDK sends a key whether it has one or not: the first that is live counts
            keyed = {"Authorization": "Bearer sk-none", "x-api-key": "sk-none"} | headers
            answer = await client.post("/v1/chat/completions", json=body, headers=keyed)
            assert answer.status_code == 200
            await proxy.seal(cap)
            answer = await client.post("/v1/chat/completions", json=body, headers=keyed)
            assert answer.status_code == 409

    asyncio.run(main())


@pytest.mark.parametrize(
    "retried", [{}, {"x-stainless-retry-count": "1"}, {"idempotency-key": "a"}]
)
@pytest.mark.parametrize("keys", [("", ""), ("a", "b")], ids=["bare", "keys"])
def test_identical_requests_that_overlap_keep_their_own(folders, retried, keys):
    """Two clients ask the same at once; the first goes away and tries again: it gets its own
    generation, however it says that it tries again, and the other's stays the other's.
    """

    async def main():
        slow = [Script(t, delay_sec=0.8) for t in ("left", "right")]
        async with running(folders["words"], [*slow, "sum"]) as (proxy, _):
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/chat/completions", {"messages": USER}

            async def ask(headers, patience=30.0):
                headers = {k: v for k, v in headers.items() if v}
                async with httpx.AsyncClient(timeout=httpx.Timeout(30, read=patience)) as own:
                    url = f"{proxy.root_url}{path}"
                    answer = await own.post(url, json=body, headers=headers)
                    return answer.json()["choices"][0]["message"]["content"]

            first = asyncio.create_task(ask({"idempotency-key": keys[0]}, patience=0.2))
            await asyncio.sleep(0.05)
            other = asyncio.create_task(ask({"idempotency-key": keys[1]}))
            with pytest.raises(httpx.ReadTimeout):
                await first
            await asyncio.sleep(0.02)
            again = asyncio.create_task(ask(retried))
            assert (await again, await other) == ("left", "right")
            assert len(proxy.engine.log) == 2
            assert len((await proxy.seal(cap)).samples) == 2

    asyncio.run(main())


def test_a_retry_count_does_not_take_from_a_client_that_is_there(folders):
    """Two are there, and a third says that it tries again: nobody's call is known to be lost."""

    async def main():
        slow = [Script(t, delay_sec=0.3) for t in ("left", "right", "sum")]
        async with running(folders["words"], slow) as (proxy, client):
            cap = proxy.open("t.0")
            path = f"/s/{cap}/v1/chat/completions"
            more = ({}, {}, {"x-stainless-retry-count": "1"})
            calls = []
            for headers in more:
                calls.append(
                    asyncio.create_task(client.post(path, json={"messages": USER}, headers=headers))
                )
                await asyncio.sleep(0.03)
            answers = [
                a.json()["choices"][0]["message"]["content"] for a in await asyncio.gather(*calls)
            ]
            assert answers == ["left", "right", "sum"]

    asyncio.run(main())


def test_the_death_of_an_old_connection_leaves_its_retry_alone(folders):
    """The retry streams already when the first connection dies at last."""

    async def main():
        talk = Script("left right sum cat", token_delay_sec=0.1)
        async with running(folders["words"], [talk, "cat"]) as (proxy, client):
            cap = proxy.open("t.0")
            body = {"messages": USER, "stream": True}
            path, key = f"{proxy.base_url(cap)}/chat/completions", {"idempotency-key": "k"}
            async with (
                httpx.AsyncClient() as old,
                old.stream("POST", path, json=body, headers=key) as first,
            ):
                await anext(first.aiter_lines())
                again = asyncio.create_task(client.post(path, json=body, headers=key))
                await asyncio.sleep(0.15)
            answer = (await again).text
            assert answer.endswith("data: [DONE]\n\n")
            said = folded(map(json.loads, frames(answer)[:-1]))
            assert said["content"] == "left right sum cat" and len(proxy.engine.log) == 1
            trajectory = await proxy.seal(cap)
            assert [t.delivery for t in trajectory.turns] == ["delivered"]

    asyncio.run(main())


def test_kill_9_and_a_new_process(folders, tmp_path):
    """The agent's URL goes on working, the lost call is known, the log ends sealed."""
    script = tmp_path / "replies.json"
    script.write_text(json.dumps(["left", {"text": "right", "delay_sec": 60}]))
    options = ["--tokenizer", folders["words"], "--logs", tmp_path / "logs"]

    def start(port):
        command = [*COMMAND, "serve", "--engine", f"scripted:{script}", *options, "--port", port]
        server = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        return server, server.stderr.readline().split()[-1]

    server, url = start(0)
    try:
        opened = httpx.post(f"{url}/sessions", json={"trial_id": "t.0"}).json()
        path = f"{opened['base_url']}/chat/completions"
        first = httpx.post(path, json={"messages": USER}, timeout=30).json()
        wired = [*USER, first["choices"][0]["message"], {"role": "user", "content": "on"}]
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(path, json={"messages": wired}, timeout=2)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.stderr.close()
    script.write_text(json.dumps(["sum"]))
    (log,) = (tmp_path / "logs").glob("*.log")
    assert not replay(read(log).records).sealed
    server, url = start(url.rsplit(":", 1)[1])
    try:
        again = httpx.post(path, json={"messages": wired}, timeout=30).json()
        assert again["choices"][0]["message"]["content"] == "sum"
        for _ in range(2):  # the second answer is read from the log
            sealed = httpx.post(f"{url}/sessions/{opened['cap']}/seal", timeout=30)
            trajectory = from_json(sealed.text)
            assert trajectory.incomplete == ("turn 1: lost in a crash",)
            assert [t.stop for t in trajectory.turns] == ["stop", "lost", "stop"]
            assert len(trajectory.samples) == 1 and len(trajectory.samples[0].stops) == 2
        assert httpx.post(path, json={"messages": wired}).status_code == 409
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        server.stderr.close()
    run = subprocess.run([*COMMAND, "replay", log], capture_output=True, text=True)
    assert run.returncode == 1 and from_json(run.stdout).to_json() == trajectory.to_json()
    old = log.read_bytes().replace(b"nanoswe-session/3", b"nanoswe-session/2")
    for data, says in (
        (b"no log", "is no session log"),
        (old, "nanoswe-session/3: replay an older one"),
    ):
        log.write_bytes(data)
        run = subprocess.run([*COMMAND, "replay", log], capture_output=True, text=True)
        assert run.returncode == 2 and says in run.stderr and run.stderr.count("\n") == 1
    command = [*COMMAND, "serve", "--engine", f"scripted:{script}", *options]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert run.returncode == 2 and "move it away" in run.stderr and str(log) in run.stderr


def test_a_reply_that_was_committed_before_the_crash_is_served_after_it(folders, tmp_path):
    async def main():
        folder, logs = folders["words"], tmp_path / "logs"
        logs.mkdir()
        async with running(folder, [Script("left", delay_sec=0.1)], logs) as (proxy, client):
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/chat/completions", json.dumps({"messages": USER}).encode()
            with pytest.raises(httpx.ReadTimeout):
                await client.post(path, content=body, timeout=0.05)
            await asyncio.sleep(0.3)
        async with running(folder, [], logs) as (proxy, client):
            answer = await client.post(path, content=body)
            assert answer.json()["choices"][0]["message"]["content"] == "left"
            trajectory = await proxy.seal(cap)
            assert [t.delivery for t in trajectory.turns] == ["delivered"]
            assert proxy.counts["recovered"] == 1

    asyncio.run(main())
