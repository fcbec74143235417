"""Engines over HTTP against a scripted server that speaks vLLM's and SGLang's wire formats over a
real socket; the scripted engine's own log is the truth.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_server import Server, folder_tokens

from nanoswe_proxy.app import serve
from nanoswe_proxy.engine import load_engine
from nanoswe_proxy.engine.base import Sampling
from nanoswe_proxy.engine.probe import probe
from nanoswe_proxy.engine.remote import TOKENS_PATH
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.errors import EngineError

KINDS = [("vllm", False), ("vllm", True), ("sglang", False)]
WAYS = pytest.mark.parametrize(("kind", "tokens_path"), KINDS, ids=["vllm", "tokens", "sglang"])


@asynccontextmanager
async def connected(folder: Path, scripts, kind="vllm", tokens_path=False, max_context=4000):
    """(the remote engine, its server) over a socket."""
    scripted = ScriptedEngine(folder, scripts, max_context=max_context)
    server = Server(scripted, folder_tokens(folder, "<|im_end|>"), kind, tokens_path)
    async with serve(SimpleNamespace(), app=server.app()) as url:
        engine = await asyncio.to_thread(load_engine, url, folder)
        try:
            yield engine, server
        finally:
            await engine.upstream.close()  # a server would, a test must


def sampling(folder: Path, most: int = 100, key: str = "k") -> Sampling:
    return Sampling(0.7, most, folder_tokens(folder, "<|im_end|>"), key)


async def sample(engine, folder, session="s", ids=(5, 6, 7), **how):
    return [s async for s in engine.generate(session, ids, sampling(folder, **how))]


@WAYS
def test_tokens_logprobs_and_the_prompt_pass_unchanged(folder, kind, tokens_path):
    async def main():
        scripts = [Script("left return right é", split_seed=3), "left", "return " * 90]
        async with connected(folder, scripts, kind, tokens_path) as (engine, server):
            assert (engine.max_context, engine.model) == (4000, "tiny")
            assert (engine.path == TOKENS_PATH) == tokens_path
            for n, ids in enumerate([[5, 6, 7], [5, 6, 7, 8, 9], [9, 9]]):  # goes on, then forks
                got = await sample(engine, folder, ids=ids, most=60)
                entry = server.engine.log[n]
                assert entry.prompt == tuple(ids)
                assert [s.token for s in got] == [s.token for s in entry.sampled]
                assert [s.logprob for s in got] == [s.logprob for s in entry.sampled]
                assert {s.version for s in got} == {0}
                assert entry.sampling.temperature == 0.7
                assert entry.sampling.stop_ids == sampling(folder).stop_ids
            assert len(server.engine.log[2].sampled) == 60  # cut at max_tokens, nothing lost
            assert len(engine.upstream._idle) == 1  # one connection did it all

    asyncio.run(main())


@WAYS
def test_cache_salt_is_of_the_session_and_the_version(folder, kind, tokens_path):
    async def main():
        async with connected(folder, lambda *_: "x", kind, tokens_path) as (engine, server):
            await sample(engine, folder, "secret-1")
            await sample(engine, folder, "secret-1")
            await sample(engine, folder, "secret-2")
            await engine.pause()
            await engine.resume(1)
            await sample(engine, folder, "secret-1")
            salts = [b.get("cache_salt") or b["extra_key"] for b in server.bodies]
            assert salts[0] == salts[1] and len(set(salts)) == 3
            assert "secret" not in "".join(salts)

    asyncio.run(main())


def test_seeds_are_of_the_place_and_not_of_the_arrival(folders):
    async def main():
        folder = folders["words"]
        async with connected(folder, lambda *_: "x") as (engine, server):
            for key in ("a/0.0", "a/0.1", "a/0.0"):
                await sample(engine, folder, key=key)
            seeds = [b["seed"] for b in server.bodies]
            assert seeds[0] == seeds[2] != seeds[1]

    asyncio.run(main())


@WAYS
def test_pause_cuts_and_resume_goes_on_from_what_is_there(folder, kind, tokens_path):
    """A weight update in the middle: the tokens before it have the old version, those after it the
    new one, none is lost or doubled, and the server saw the first part as a prompt.
    """

    def script(session, ids, how):
        return Script(ids=tuple(range(20 + len(ids), 30)), token_delay_sec=0.02)

    async def main():
        async with connected(folder, script, kind, tokens_path) as (engine, server):
            task = asyncio.create_task(sample(engine, folder))
            while len(server.engine.log) < 1 or len(server.engine.log[0].sampled) < 3:
                await asyncio.sleep(0.005)
            await engine.pause()
            waiting = asyncio.create_task(sample(engine, folder, "other", ids=range(8)))
            await asyncio.sleep(0.1)
            assert not task.done() and not waiting.done() and len(server.engine.log) == 1
            await engine.resume(4)
            got = await task
            assert {s.version for s in await waiting} == {4}
            tokens = [s.token for s in got]
            assert tokens == [*range(23, 30), *sampling(folder).stop_ids]
            first = [s for s in got if s.version == 0]
            assert 0 < len(first) < 7 and {s.version for s in got[len(first) :]} == {4}
            entry = next(e for e in server.engine.log[1:] if e.prompt[:3] == (5, 6, 7))
            assert entry.prompt == (5, 6, 7, *(s.token for s in first))
            assert entry.sampling.max_tokens == 100 - len(first)

    asyncio.run(main())


@WAYS
def test_a_client_that_goes_away_hangs_up(folder, kind, tokens_path):
    async def main():
        slow = Script("left " * 50, token_delay_sec=0.02)
        async with connected(folder, lambda *_: slow, kind, tokens_path) as (engine, server):
            stream = engine.generate("s", [5], sampling(folder))
            await anext(stream)
            await stream.aclose()
            for _ in range(100):
                await asyncio.sleep(0.01)
                if server.hung_up:
                    break
            assert server.hung_up == 1 and engine.upstream._idle == []

    asyncio.run(main())


def test_faults_are_one_clear_error(folders, monkeypatch):
    folder = folders["words"]

    async def main():
        scripts = [Script("left", fail_after=1), "right", "x", "x", "x"]
        async with connected(folder, scripts) as (engine, server):
            with pytest.raises(EngineError, match="completions"):  # it hung up in the middle
                await sample(engine, folder)
            server.fault = (503, "overloaded")
            with pytest.raises(EngineError, match="503.*overloaded"):
                await sample(engine, folder)
            server.fault = None
            assert len(await sample(engine, folder)) == 2
            engine.upstream._idle[0][2].close()  # gone stale: replaced without a word
            assert len(await sample(engine, folder)) == 2
            silent = [{"tokens": ["token_id:5"], "token_logprobs": [x]} for x in (None, -9999.0)]
            for broken, says in (
                ({"error": {"message": "boom"}}, "boom"),
                ({"choices": []}, "choices"),
                *(({"choices": [{"logprobs": x}]}, "no logprob for .* 5") for x in silent),
            ):

                async def events(*_, broken=broken):
                    yield json.dumps(broken).encode()

                monkeypatch.setattr(engine.upstream, "events", events)
                with pytest.raises(EngineError, match=says):
                    await sample(engine, folder)
            monkeypatch.undo()
            monkeypatch.setattr(engine, "pause_path", "/nowhere")
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE"):
                await engine.pause()
            monkeypatch.setattr(engine.upstream, "url", "http://127.0.0.1:9")
            with pytest.raises(EngineError, match="127.0.0.1:9/nowhere: ConnectError"):
                await engine.pause()
            monkeypatch.undo()
            assert len(await asyncio.wait_for(sample(engine, folder), 10)) == 2  # it goes on

    asyncio.run(main())
    for url in ("http://127.0.0.1:9", "http://nobody.invalid:1", "remote:ftp://x"):
        with pytest.raises(EngineError, match=url.removeprefix("remote:")):
            load_engine(url, folder)


RAW = "raw (train at temperature 1)"


@WAYS
@pytest.mark.parametrize("fault", ["", "busy", "goes on", "no text", "raw"])
def test_an_engine_is_probed_before_it_serves(folder, renderer, kind, tokens_path, fault):
    """Facts of a good one; one line for one that goes on after its stop, or has another tokenizer.
    The script is a model: what it says depends on the prompt, the seed and the temperature.
    """

    def script(session, ids, how):
        dice = 70 + int(how.seed_key) % 20 if how.temperature == 1 else 70
        return Script(ids=(dice, 71, 72, 99_999 if fault == "no text" else 73))

    async def main():
        async with connected(folder, script, kind, tokens_path) as (engine, server):
            whole = server.engine.generate

            async def generate(session, ids, how):
                if fault == "busy" and len(server.bodies) % 3 == 1:
                    raise EngineError("not now")
                stops = server.stop_ids if fault == "goes on" else how.stop_ids
                async for s in whole(session, ids, replace(how, stop_ids=stops)):
                    warm = 0.0 if fault == "raw" else how.temperature
                    yield replace(s, logprob=-(1 + warm) / (1 + s.token))

            server.engine.generate = generate
            return await probe(engine, renderer)

    if fault in ("goes on", "no text"):
        with pytest.raises(EngineError, match="unfit engine: asked to stop at .* it gave"):
            asyncio.run(main())
    else:
        facts = asyncio.run(main())
        assert facts["seeds_repeat"] and facts["seeds_differ"] and facts["max_context"] == 4000
        assert facts["logprobs"] == (RAW if fault == "raw" else "of what is sampled")


def test_a_long_prompt_is_serialised_once(folders):
    """What is written anew for turn n+1 is what turn n+1 added: counted, not timed."""
    folder = folders["words"]

    async def main():
        async with connected(folder, lambda *_: "x", max_context=100_000) as (engine, server):
            ids = list(range(20_000))
            written = []
            for turn in range(5):
                await sample(engine, folder, ids=[*ids, *range(turn * 10)])
                assert server.bodies[turn]["prompt"] == [*ids, *range(turn * 10)]
                written.append(engine._texts["s"][2])
            assert all(b.startswith(a) for a, b in pairwise(written))
            await engine.release("s")
            assert not engine._texts

    asyncio.run(main())
