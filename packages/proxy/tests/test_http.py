"""The shell: routes, errors, retries by delivery evidence, many sessions at once, and a real
socket.
"""

import asyncio
import json
import logging
import time
import zlib
from contextlib import asynccontextmanager

import httpx
import pytest

from nanoswe_proxy import app as shell
from nanoswe_proxy.app import create_app, serve, watch
from nanoswe_proxy.dialects import chat as chat_dialect
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.errors import EngineError, SealedError
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.trajectory import from_json

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat left"}}\n</tool_call>'
USER = [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]


@asynccontextmanager
async def running(folder, scripts, **limits):
    engine = ScriptedEngine(folder, scripts, max_context=limits.get("max_context", 2000))
    proxy = Proxy(engine, Renderer(folder), max_tokens=200)
    transport = httpx.ASGITransport(create_app(proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        yield proxy, client


def chat(client, cap, messages=USER, **fields):
    return client.post(f"/s/{cap}/v1/chat/completions", json={"messages": messages, **fields})


async def converse(client, cap, turns):
    """A polite agent: sends back what it was served, and a result."""
    wired = list(USER)
    for n in range(turns):
        answer = await chat(client, cap, wired)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        wired.append(message)
        if "tool_calls" in message:
            call_id = message["tool_calls"][0]["id"]
            wired.append({"role": "tool", "tool_call_id": call_id, "content": f"{n} <|im_end|>\n"})
        else:
            wired.append({"role": "user", "content": "go on"})


def matches_engine_log(engine, cap, trajectory):
    """Each logged generation lies in exactly one row, after the prompt that the engine saw."""
    rows = trajectory.samples
    entries = [e for e in engine.log if e.session == cap]
    assert trajectory.conservation.sampled == sum(len(e.sampled) for e in entries)
    for entry in entries:
        whole = entry.prompt + tuple(s.token for s in entry.sampled)
        n = len(entry.prompt)
        owners = [
            r for r in rows if r.tokens[: len(whole)] == whole and all(r.mask[n : len(whole)])
        ]
        assert len(owners) == 1
        assert owners[0].logprobs[n : len(whole)] == tuple(s.logprob for s in entry.sampled)
        assert owners[0].versions[n : len(whole)] == tuple(s.version for s in entry.sampled)


def test_open_chat_seal(folder):
    async def main():
        async with running(folder, [CALL, Script("done", bump_after=1)]) as (proxy, client):
            opened = await client.post(
                "/sessions", json={"trial_id": "t.0", "try": 1, "sampling": {"temperature": 0.5}}
            )
            assert opened.status_code == 201
            cap = opened.json()["cap"]
            assert opened.json()["base_url"] == f"http://proxy/s/{cap}/v1"
            assert (await client.get(f"/s/{cap}/v1/models")).json()["data"][0]["id"] == "policy"
            first = await chat(client, cap, model="gpt-x", temperature=0.1, max_tokens=150)
            body = first.json()
            assert body["model"] == "gpt-x" and body["object"] == "chat.completion"
            choice = body["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            function = choice["message"]["tool_calls"][0]["function"]
            assert function == {"name": "bash", "arguments": '{"command": "cat left"}'}
            assert body["usage"]["prompt_tokens"] == len(proxy.engine.log[0].prompt)
            result = {"role": "tool", "tool_call_id": "any", "content": "x"}
            await chat(client, cap, [*USER, choice["message"], result])
            sealed = await client.post(f"/sessions/{cap}/seal")
            trajectory = from_json(sealed.text)
            assert (trajectory.trial_id, trajectory.try_, trajectory.temperature) == ("t.0", 1, 0.5)
            assert trajectory.turns[0].requested == {
                "temperature": 0.1, "max_tokens": 150, "model": "gpt-x"
            }  # fmt: skip
            assert [e.sampling.temperature for e in proxy.engine.log] == [0.5, 0.5]
            assert [e.sampling.max_tokens for e in proxy.engine.log] == [150, 200]
            matches_engine_log(proxy.engine, cap, trajectory)
            assert set(trajectory.samples[0].versions) == {-1, 0, 1}
            assert (await client.post(f"/sessions/{cap}/seal")).text == sealed.text
            assert proxy.engine.released == [cap]
            assert (await client.get("/healthz")).json() == {
                "status": "ok", "version": 1, "open_sessions": 0
            }  # fmt: skip
            metrics = (await client.get("/metrics")).text
            assert "nanoswe_proxy_calls_total 2\n" in metrics

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b"{}", 400, "messages"),
        ({"messages": []}, 400, "at least one"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        ({"messages": [*USER, {"role": "assistant", "content": "x"}]}, 400, "continuing"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "function.name"),
        ({"messages": USER, "n": 129}, 400, "n must be at most 128"),
        ({"messages": USER, "n": 0}, 400, "n must be a positive"),
        ({"messages": USER, "n": True}, 400, "n must be a positive"),
        ({"messages": USER, "stop": ["x", 1]}, 400, "stop must be text"),
        ({"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": USER, "tools": ["x"]}, 400, "tools"),
        ({"messages": USER, "tools": [{"type": "function", "function": 5}]}, 400, "tools"),
        (
            {"messages": USER, "tools": [{"function": {"parameters": {"properties": 5}}}]},
            400,
            "too",
        ),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
    ],
)
def test_bad_requests(folders, body, status, says):
    async def main():
        async with running(folders["words"], ["x"]) as (proxy, client):
            cap = proxy.open("t.0")
            raw = body if isinstance(body, bytes) else json.dumps(body)
            answer = await client.post(f"/s/{cap}/v1/chat/completions", content=raw)
            assert answer.status_code == status
            assert says in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert (await chat(client, cap)).status_code == 200  # and nothing is broken

    asyncio.run(main())


def test_errors_of_sessions_and_engine(folders, monkeypatch):
    async def main():
        scripts = [Script("left right left", fail_after=2), Script(ids=(70, 71), close=False), "ok"]
        async with running(folders["words"], scripts, max_context=60) as (proxy, client):
            assert (await chat(client, "nobody")).status_code == 404
            assert (await client.get("/nowhere")).json()["error"]["type"] == "invalid_request_error"
            assert (await client.post("/sessions", json={"try": -1, "x": 1})).status_code == 400
            for odd in ({"sampling": 5}, {"sampling": {"self": 1}}, {"self": 1}, {"sampling": [1]},
                        {"sampling": {"sampling": {}}}, {"try": "x"},
                        {"try_": -1}, {"sampling": {"try_": None}}):  # fmt: skip
                answer = await client.post("/sessions", json={"trial_id": "t.0", **odd})
                assert answer.status_code == 400, odd
            cap = proxy.open("t.0")
            long = await chat(client, cap, [{"role": "user", "content": "left " * 50}])
            assert long.status_code == 400
            assert long.json()["error"]["code"] == "context_length_exceeded"
            for _ in range(2):  # a fault of the engine, and an engine that stops short
                failed = await chat(client, cap)
                assert (failed.status_code, failed.json()["error"]["code"]) == (502, "engine_error")
            assert (await chat(client, cap)).status_code == 200
            trajectory = await proxy.seal(cap)
            assert trajectory.conservation.masked == {"aborted": 4}
            assert [t.delivery for t in trajectory.turns] == ["aborted", "aborted", "delivered"]
            late = await chat(client, cap)
            assert (late.status_code, late.json()["error"]["code"]) == (409, "session_sealed")
            other = proxy.open("t.1")
            monkeypatch.setattr(shell, "MAX_BODY_BYTES", 100)
            assert (
                await chat(client, other, [{"role": "user", "content": "x" * 99}])
            ).status_code == 413

            async def chunks():
                for _ in range(9):
                    yield b"x" * 20

            path = f"/s/{other}/v1/chat/completions"
            assert (await client.post(path, content=chunks())).status_code == 413

    asyncio.run(main())


def test_many_sessions_do_not_mix(folder):
    """40 sessions at once, replies in non-canonical pieces, truncations: the engine's log is the
    truth.
    """

    def script(session, ids, sampling):
        dice = zlib.crc32(sampling.seed_key.encode())
        kind = dice % 4
        said = [CALL, "left return right", "<tool_call>\n{broken", "return" * 80][kind]
        return Script(said, split_seed=dice, delay_sec=(dice % 5) / 1000)

    async def main():
        async with running(folder, script, max_context=8000) as (proxy, client):
            caps = [proxy.open(f"t.{i}", max_tokens=60) for i in range(40)]
            await asyncio.gather(*(converse(client, cap, 6) for cap in caps))
            trajectories = [await proxy.seal(cap) for cap in caps]
            assert [len(t.samples) for t in trajectories] == [1] * 40
            assert len(proxy.engine.log) == 240
            assert {e.session for e in proxy.engine.log} == set(caps)
            for cap, trajectory in zip(caps, trajectories, strict=True):
                matches_engine_log(proxy.engine, cap, trajectory)
            assert {t.stop for x in trajectories for t in x.turns} == {"stop", "length"}
            assert {t.parse for x in trajectories for t in x.turns} >= {"calls", "malformed"}

    asyncio.run(main())


def test_same_body_while_the_client_waits_is_a_new_sample(folders):
    async def main():
        slow = Script("left", delay_sec=0.05)
        async with running(folders["words"], [slow, slow, slow]) as (proxy, client):
            cap = proxy.open("t.0")
            answers = await asyncio.gather(chat(client, cap), chat(client, cap))
            again = await chat(client, cap)  # delivered, too: never replayed
            assert len({a.json()["id"] for a in (*answers, again)}) == 3
            trajectory = await proxy.seal(cap)
            assert len(trajectory.samples) == 3
            keys = {e.sampling.seed_key for e in proxy.engine.log}
            assert keys == {"t.0/0/0.0", "t.0/0/0.1", "t.0/0/0.2"}

    asyncio.run(main())


def test_too_many_calls_wait_and_too_many_sessions_are_refused(folders):
    """Five calls at once over one slot: all are answered, one after the other, none with a 429."""

    async def main():
        folder, running, most = folders["words"], set(), []

        class Watched(ScriptedEngine):
            async def generate(self, session, ids, sampling):
                running.add(session)
                most.append(len(running))
                async for sampled in super().generate(session, ids, sampling):
                    yield sampled
                running.remove(session)

        engine = Watched(folder, lambda *_: Script("left", delay_sec=0.01))
        proxy = Proxy(engine, Renderer(folder), max_calls=1, max_sessions=5)
        app = create_app(proxy)
        async with serve(proxy, app=app) as url, httpx.AsyncClient(base_url=url) as client:
            caps = [proxy.open(f"t.{n}") for n in range(5)]
            answers = await asyncio.gather(*(chat(client, cap) for cap in caps))
            assert [a.status_code for a in answers] == [200] * 5 and max(most) == 1
            refused = await client.post("/sessions", json={"trial_id": "t.5"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_sessions"
            await proxy.seal(caps[0])
            opened = await client.post("/sessions", json={"trial_id": "t.5"})
            assert opened.status_code == 201

    asyncio.run(main())


def test_a_session_has_a_page(folders):
    async def main():
        async with running(folders["bpe"], ["hello"]) as (proxy, client):
            cap = proxy.open("t.0")
            await chat(client, cap)
            shown = await client.get(f"/s/{cap}/view")
            assert shown.headers["content-type"].startswith("text/html")
            assert '"trial": "t.0"' in shown.text and '"finish_reason": "stop"' in shown.text
            assert (await client.get("/s/nobody/view")).status_code == 404
            await proxy.seal(cap)
            assert (await client.get(f"/s/{cap}/view")).status_code == 409
        agents = httpx.ASGITransport(create_app(proxy, control=False))
        async with httpx.AsyncClient(transport=agents, base_url="http://proxy") as client:
            assert (await client.get(f"/s/{cap}/view")).status_code == 404

    asyncio.run(main())


async def hang_up(url, cap, body, after_sec):
    """Send a request over a bare socket and close it before the answer."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    path = f"/s/{cap}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(after_sec)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("wait_sec", [0.02, 0.4], ids=["in flight", "finished"])
def test_retry_after_hang_up_gets_the_same_answer(folders, wait_sec):
    """Nobody received the first answer: the same body meets it, running or finished, and adds no
    turn.
    """

    async def main():
        folder = folders["words"]
        engine = ScriptedEngine(folder, [Script("left", delay_sec=0.2), "right"])
        proxy = Proxy(engine, Renderer(folder))
        async with serve(proxy) as url, httpx.AsyncClient() as client:
            cap = proxy.open("t.0")
            body = json.dumps({"messages": USER}).encode()
            await hang_up(url, cap, body, 0.05)
            await asyncio.sleep(wait_sec)
            path = f"{proxy.base_url(cap)}/chat/completions"
            answer = await client.post(path, content=body)
            assert answer.json()["choices"][0]["message"]["content"] == "left"
            assert len(engine.log) == 1 and proxy.counts["replayed"] == 1
            fresh = await client.post(path, content=body)
            assert fresh.json()["choices"][0]["message"]["content"] == "right"
            trajectory = await proxy.seal(cap)
            assert [t.delivery for t in trajectory.turns] == ["delivered", "delivered"]

    asyncio.run(main())


@pytest.mark.parametrize("kept", [False, True], ids=["connection gone", "connection kept"])
def test_a_reply_that_may_have_been_eaten_on_the_way_is_sent_again_once(folders, monkeypatch, kept):
    """Rule (e): all of it was sent, nothing followed, and the connection is gone at once: the same
    body gets the same reply, once, and it is noted. A client that is still there wants another.
    """

    async def main():
        folder = folders["words"]
        proxy = Proxy(ScriptedEngine(folder, ["left", "right", "sum"]), Renderer(folder))
        async with serve(proxy), httpx.AsyncClient() as client:
            cap, said = proxy.open("t.0"), []
            path, close = f"{proxy.base_url(cap)}/chat/completions", {"connection": "close"}
            for _ in range(3):
                headers = {} if kept else close
                answer = await client.post(path, json={"messages": USER}, headers=headers)
                said.append(answer.json()["choices"][0]["message"]["content"])
                await asyncio.sleep(0.05)
            monkeypatch.setattr("nanoswe_proxy.exchange.GRACE_SEC", 0.01)  # it is too late now
            if not kept:
                answer = await client.post(path, json={"messages": USER})
                said.append(answer.json()["choices"][0]["message"]["content"])
            trajectory = await proxy.seal(cap)
            if kept:
                assert said == ["left", "right", "sum"] and trajectory.notes == {}
            else:
                assert said == ["left", "left", "right", "sum"]
                assert trajectory.notes == {"replayed_in_doubt": [1]}
            assert len(trajectory.turns) == 3

    asyncio.run(main())


def test_reply_that_nobody_received_is_masked(folders):
    async def main():
        folder = folders["words"]
        engine = ScriptedEngine(folder, [Script("left", delay_sec=0.1)])
        proxy = Proxy(engine, Renderer(folder))
        async with serve(proxy) as url:
            cap = proxy.open("t.0")
            await hang_up(url, cap, json.dumps({"messages": USER}).encode(), 0.02)
            await asyncio.sleep(0.2)
            trajectory = await proxy.seal(cap)
            assert trajectory.samples == ()
            assert trajectory.conservation.masked == {"undelivered": 2}

    asyncio.run(main())


def test_a_call_that_is_sealed_before_it_begins_says_why(folders):
    async def main():
        async with running(folders["words"], ["left"]) as (proxy, _):
            cap, raw = proxy.open("t.0"), json.dumps({"messages": USER}).encode()
            exchange = await proxy.call(cap, raw, chat_dialect.parse(raw))
            await proxy.seal(cap)
            assert isinstance(exchange.task.exception(), SealedError)

    asyncio.run(main())


def test_seal_cancels_a_call_in_flight(folders):
    async def main():
        async with running(folders["words"], [Script("left", delay_sec=30)]) as (proxy, client):
            cap = proxy.open("t.0")
            waiting = asyncio.create_task(chat(client, cap))
            await asyncio.sleep(0.05)
            trajectory = await proxy.seal(cap)
            assert (await waiting).status_code == 409
            assert [t.stop for t in trajectory.turns] == ["aborted"]
            assert proxy.health()["open_sessions"] == 0

    asyncio.run(main())


def test_serve_leaves_nothing_behind(folders, caplog):
    async def main():
        folder = folders["words"]
        proxy = Proxy(ScriptedEngine(folder, [CALL, "done"]), Renderer(folder))
        before = asyncio.all_tasks()
        async with serve(proxy) as url, httpx.AsyncClient(base_url=url) as client:
            cap = proxy.open("t.0")
            assert proxy.base_url(cap) == f"{url}/s/{cap}/v1"
            await converse(client, cap, 2)
            assert (await client.post("/sessions", json={"trial_id": "x"})).status_code == 404
            matches_engine_log(proxy.engine, cap, await proxy.seal(cap))
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as client:
                await client.get(f"{url}/healthz")
        async with serve(proxy) as url:
            with pytest.raises(OSError, match="in use"):
                async with serve(proxy, port=int(url.rsplit(":", 1)[1])):
                    pass

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert not [r for r in caplog.records if r.name.startswith("uvicorn")]


def test_the_trainers_routes(folders):
    """Key, open, annotate, pause, resume, show, seal, and what was counted."""

    async def main():
        folder = folders["words"]
        proxy = Proxy(ScriptedEngine(folder, ["left", "right"]), Renderer(folder))
        async with (
            serve(proxy, app=create_app(proxy, admin_key="k")) as url,
            httpx.AsyncClient(base_url=url) as agent,
            httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer k"}) as trainer,
        ):
            opened = (await trainer.post("/sessions", json={"trial_id": "t.0"})).json()
            cap, control = opened["cap"], f"/sessions/{opened['cap']}"
            for refused in (
                agent.post("/sessions", json={"trial_id": "t.1"}), agent.post(f"{control}/seal"),
                agent.post("/pause"), agent.post("/resume", json={"version": 0}),
                agent.post(f"{control}/annotate", json={"reward": 9}), agent.get(control),
                agent.get(f"/s/{cap}/view"),
            ):  # fmt: skip
                answer = await refused
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "admin_key_needed"
            wrong = {"Authorization": "Bearer ké".encode("latin-1")}
            assert (await agent.post("/pause", headers=wrong)).status_code == 401
            assert (await chat(agent, cap)).status_code == 200
            assert (await trainer.post("/pause")).json() == {"paused": True}
            waiting = asyncio.create_task(chat(agent, cap))
            await asyncio.sleep(0.1)
            assert len(proxy.engine.log) == 1 and not waiting.done()
            for body in ({}, {"version": "1"}, {"version": 7}):
                assert (await trainer.post("/resume", json=body)).status_code == 400
            assert (await trainer.post("/resume", json={"version": 0})).status_code == 200
            assert (await waiting).status_code == 200 and len(proxy.engine.log) == 2
            for odd in (b'{"reward": NaN}', b'{"reward": -Infinity}'):  # nothing of it is kept
                refused = await trainer.post(f"{control}/annotate", content=odd)
                assert (refused.status_code, refused.json()["error"]["type"]) == (
                    400, "invalid_request_error")  # fmt: skip
            noted = await trainer.post(f"{control}/annotate", json={"reward": 0.5})
            assert noted.json() == {"reward": 0.5}
            shown = from_json((await trainer.get(control)).text)
            assert len(shown.turns) == 2 and shown.incomplete == ("not sealed",)
            sealed = from_json((await trainer.post(f"{control}/seal")).text)
            assert sealed.notes == {"reward": 0.5} and sealed.incomplete == ()
            assert (await trainer.get("/sessions/none")).status_code == 404
            assert (await trainer.post(f"{control}/annotate", json={})).status_code == 409
            metrics = (await agent.get("/metrics")).text
            assert 'nanoswe_proxy_errors_total{status="401"} 8\n' in metrics
            assert 'nanoswe_proxy_matched_total{level="0"} 2\n' in metrics

    asyncio.run(main())


def test_health_answers_while_the_loop_is_busy(folders):
    """While the loop is held health says so, and metrics come as well."""

    async def main():
        proxy = Proxy(ScriptedEngine(folders["words"], ["left"]), Renderer(folders["words"]))
        url, seen = watch(proxy, "127.0.0.1", 0), []

        def look():
            for path in ("health", "metrics"):
                seen.append(httpx.get(f"{url}/{path}", timeout=30))

        await asyncio.to_thread(look)
        assert seen[0].json()["status"] == "ok" and seen[0].json()["late_sec"] < 1
        looking = asyncio.get_running_loop().run_in_executor(None, look)
        limit = time.monotonic() + 60
        while len(seen) < 4 and time.monotonic() < limit:
            time.sleep(0.05)  # nobody else gets a turn until both have answered
        health, metrics = seen[2:]
        await looking
        assert health.json()["status"] == "busy" and health.json()["late_sec"] >= 1
        assert "nanoswe_proxy_open_sessions 0" in metrics.text
        assert httpx.get(f"{url}/sessions").status_code == 404

    asyncio.run(main())


def test_a_long_prompt_does_not_stall_the_loop(folders):
    """While a long prompt is encoded, the loop goes on: its longest wait is a part of the whole."""

    async def main():
        folder = folders["bpe"]
        proxy = Proxy(ScriptedEngine(folder, ["x"], max_context=10**6), Renderer(folder))
        messages = [{"role": "user", "content": "the quick brown fox left + right " * 10_000}]
        raw, waits, last = json.dumps({"messages": messages}).encode(), [], time.perf_counter()
        counting = asyncio.create_task(proxy.count(proxy.open("t.0"), chat_dialect.parse(raw)))
        began = last
        while not counting.done():
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - last)
            last = time.perf_counter()
        assert await counting > 50_000
        assert max(waits) < (last - began) / 2

    asyncio.run(main())


def test_a_trajectory_is_kept_once_however_often_it_is_sealed(folders, tmp_path):
    async def main(logs):
        folder, kept = folders["words"], []
        proxy = Proxy(ScriptedEngine(folder, ["left"]), Renderer(folder), logs)
        transport = httpx.ASGITransport(create_app(proxy))
        proxy.on_seal = kept.append
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            cap = proxy.open("t.0")
            await chat(client, cap)
            seals = (client.post(f"/sessions/{cap}/seal") for _ in range(3))
            answers = [await s for s in seals]
            assert len({a.text for a in answers}) == 1 and len(kept) == 1
        proxy = Proxy(ScriptedEngine(folder, ["left"]), Renderer(folder), logs)
        transport = httpx.ASGITransport(create_app(proxy))
        proxy.on_seal = kept.append
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            again = await client.post(f"/sessions/{cap}/seal")
            assert again.status_code == (200 if logs else 404) and len(kept) == 1

    asyncio.run(main(None))
    asyncio.run(main(tmp_path))


def test_a_pause_that_fails_changes_nothing(folders):
    async def main():
        class Stubborn(ScriptedEngine):
            async def pause(self):
                raise EngineError("not now")

            async def resume(self, version):
                pass

        proxy = Proxy(Stubborn(folders["words"], ["left"]), Renderer(folders["words"]))
        transport = httpx.ASGITransport(create_app(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            cap = proxy.open("t.0")
            failed = await client.post("/pause")
            assert (failed.status_code, failed.json()["error"]["message"]) == (502, "not now")
            assert (await asyncio.wait_for(chat(client, cap), 10)).status_code == 200

    asyncio.run(main())
