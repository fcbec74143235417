"""Several replies to one request, and `/v1/completions`: prompts of the client's own, as text or
ids. Each reply is a row of its own, with the engine's ids; streams add up to whole bodies.
"""

import asyncio
import json
from collections import Counter

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_http import CALL, USER, chat, hang_up, matches_engine_log, running
from test_stream import frames

from nanoswe_proxy.app import create_app, serve
from nanoswe_proxy.dialects import completions
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.errors import BadRequest
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer


def complete(client, cap, prompt, **fields):
    return client.post(f"/s/{cap}/v1/completions", json={"prompt": prompt, **fields})


def by_seed(folder):
    """Another reply for another seed, some of it in pieces, with text before calls."""

    def script(session, ids, sampling):
        at = int(sampling.seed_key.rsplit(".", 1)[1])
        said = ["left é", f"right\n{CALL}", "\n\nsum 🦊", "of"][at % 4]
        return Script(said, split_seed=at)

    return script


def folded(text):
    """The choices that a stream of completions adds up to."""
    *chunks, last = frames(text)
    choices = {}
    assert last == "[DONE]"
    for choice in (c for chunk in chunks for c in json.loads(chunk)["choices"]):
        kept = choices.setdefault(choice["index"], {"text": "", "logprobs": None})
        kept["text"] += choice["text"]
        if choice["logprobs"]:
            kept["logprobs"] = kept["logprobs"] or {k: [] for k in choice["logprobs"]}
            for key, said in choice["logprobs"].items():
                kept["logprobs"][key] += said or []
        kept["finish_reason"] = choice["finish_reason"]
    return choices, [json.loads(c) for c in chunks]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_chat_are_siblings(folder, stream):
    """Each has its own ids; the agent goes on from two of them; every row is the engine's."""

    async def main():
        async with running(folder, by_seed(folder)) as (proxy, client):
            cap = proxy.open("t.0")
            asked = {"n": 4, "stream": stream, "stream_options": {"include_usage": True}}
            answer = await chat(client, cap, **asked)
            if stream:
                messages, usage = {}, None
                for chunk in map(json.loads, frames(answer.text)[:-1]):
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        kept = messages.setdefault(choice["index"], {"role": "assistant"})
                        for key in ("content", "reasoning_content"):
                            if key in choice["delta"]:
                                kept[key] = kept.get(key, "") + (choice["delta"][key] or "")
                        for call in choice["delta"].get("tool_calls", ()):
                            if "id" in call:
                                kept.setdefault("tool_calls", []).append(dict(call))
                            else:
                                said = call["function"]["arguments"]
                                kept["tool_calls"][call["index"]]["function"]["arguments"] += said
                messages = [messages[i] for i in range(4)]
            else:
                body = answer.json()
                assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
                messages, usage = [c["message"] for c in body["choices"]], body["usage"]
            log = proxy.engine.log
            assert len({e.prompt for e in log}) == 1 and len({e.sampling for e in log}) == 4
            assert usage["prompt_tokens"] == len(log[0].prompt)
            assert usage["completion_tokens"] == sum(len(e.sampled) for e in log)
            texts = [m["content"] or "" for m in messages]
            assert Counter(t.strip() for t in texts) == Counter(
                [texts[0], "right", "sum" + texts[2].strip()[3:], "of"]
            )
            (call,) = messages[1]["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
            await chat(client, cap, [*USER, messages[1], result])
            await chat(client, cap, [*USER, messages[3], {"role": "user", "content": "on"}])
            trajectory = await proxy.seal(cap)
            assert [t.fork for t in trajectory.turns] == [""] * 6
            assert [t.parent for t in trajectory.turns] == [-1, -1, -1, -1, 1, 3]
            assert len(trajectory.samples) == 4 and trajectory.conservation.masked == {}
            matches_engine_log(proxy.engine, cap, trajectory)

    asyncio.run(main())


def test_choices_are_met_again_together_or_not_at_all(folders, tmp_path):
    """A client hangs up; the same body gets all the replies of the first time, and another number
    of them is another request. So it is after a crash.
    """

    async def main():
        folder = folders["words"]
        slow = lambda *a: Script(f"left {a[2].seed_key[-1]}", delay_sec=0.1)  # noqa: E731
        proxy = Proxy(ScriptedEngine(folder, slow), Renderer(folder), tmp_path)
        body = json.dumps({"messages": USER, "n": 3}).encode()
        async with serve(proxy) as url:
            cap = proxy.open("t.0")
            await hang_up(url, cap, body, 0.02)
            await asyncio.sleep(0.3)
        again = Proxy(ScriptedEngine(folder, ["right"] * 2), Renderer(folder), tmp_path)
        async with serve(again), httpx.AsyncClient() as client:
            path = f"{again.base_url(cap)}/chat/completions"
            met = (await client.post(path, content=body)).json()
            said = [c["message"]["content"] for c in met["choices"]]
            assert said == ["left 0", "left 1", "left 2"] and not again.engine.log
            other = json.dumps({"messages": USER, "n": 2}).encode()
            fresh = (await client.post(path, content=other)).json()
            assert [c["message"]["content"] for c in fresh["choices"]] == ["right"] * 2
            trajectory = await again.seal(cap)
            assert [t.delivery for t in trajectory.turns] == ["delivered"] * 5
            assert trajectory.conservation.trained == trajectory.conservation.sampled

    asyncio.run(main())


def test_where_one_choice_fails_all_do(folders):
    """One error; what was sampled is masked with a reason, and the slots are free again."""

    async def main():
        def script(session, ids, sampling):
            at = sampling.seed_key[-1]
            how = {"0": {}, "1": {"fail_after": 1}, "2": {"token_delay_sec": 5}}
            return Script("left right", **how.get(at, {}))

        async with running(folders["words"], script) as (proxy, client):
            cap = proxy.open("t.0")
            failed = await chat(client, cap, n=3)
            assert failed.status_code == 502 and "scripted" in failed.json()["error"]["message"]
            assert (await chat(client, cap)).status_code == 200
            trajectory = await proxy.seal(cap)
            assert [t.masked for t in trajectory.turns] == ["undelivered", "aborted", "aborted", ""]
            masked = sum(trajectory.conservation.masked.values())
            assert trajectory.conservation.trained == trajectory.conservation.sampled - masked > 0

    asyncio.run(main())


def test_a_client_that_leaves_stops_all_choices(folders):
    """In the middle of the stream: no choice goes on, each is masked, the same body is sampled
    anew, and a completion has its place on the session's page.
    """

    async def main():
        folder, turns = folders["words"], iter(range(9))
        slow = lambda *_: Script("left " * 20, token_delay_sec=0.02 * (next(turns) < 3))  # noqa: E731
        proxy = Proxy(ScriptedEngine(folder, slow), Renderer(folder), max_tokens=100)
        app = create_app(proxy)
        async with serve(proxy, app=app) as url, httpx.AsyncClient(base_url=url) as client:
            cap = proxy.open("t.0")
            path, body = f"/s/{cap}/v1/completions", {"prompt": "of", "n": 3, "max_tokens": 90}
            async with client.stream("POST", path, json=body | {"stream": True}) as answer:
                async for _ in answer.aiter_lines():
                    break
            for _ in range(100):
                if not proxy.live(cap).running:
                    break
                await asyncio.sleep(0.02)
            assert [n.delivery for n in proxy.live(cap).session.generations()] == ["aborted"] * 3
            again = (await client.post(path, json=body)).json()
            assert len(again["choices"]) == 3 and len(proxy.engine.log) == 6
            assert (await client.get(f"/s/{cap}/view")).status_code == 200
            trajectory = await proxy.seal(cap)
            sampled = sum(t.sampled_tokens for t in trajectory.turns[:3])
            assert trajectory.conservation.masked == {"aborted": sampled}
            assert len(trajectory.samples) == 3

    asyncio.run(main())


def test_prompts_as_text_and_as_ids(folder):
    """The engine sees the ids that were given, or the tokenizer's; structure in them is meant."""

    async def main():
        said = (Script(f"{n or ''}left é 🦊", split_seed=1) for n in range(9))
        async with running(folder, lambda *_: next(said)) as (proxy, client):
            cap, full = proxy.open("t.0"), proxy.renderer.codec.full
            text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
            ids = full.encode(text, add_special_tokens=False).ids
            odd = [*reversed(ids), 70, 71]  # what no tokenizer would give
            one = (await complete(client, cap, text, max_tokens=90)).json()
            assert one["object"] == "text_completion" and one["choices"][0]["text"] == "left é 🦊"
            assert one["choices"][0]["finish_reason"] == "stop" and one["choices"][0]["index"] == 0
            two = (await complete(client, cap, odd, max_tokens=2)).json()
            assert two["choices"][0]["finish_reason"] == "length"
            both = (await complete(client, cap, [text, "left"], n=2, max_tokens=90)).json()
            assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
            await complete(client, cap, [odd])
            seen = [list(e.prompt) for e in proxy.engine.log]
            left = full.encode("left", add_special_tokens=False).ids
            assert seen == [ids, odd, ids, ids, left, left, odd]
            usage = both["usage"]
            assert usage["prompt_tokens"] == len(ids) + len(left)
            assert usage["completion_tokens"] == sum(len(e.sampled) for e in proxy.engine.log[2:6])
            assert proxy.engine.log[-1].sampling.max_tokens == 16  # the protocol's own
            keys = [e.sampling.seed_key for e in proxy.engine.log]
            assert len(set(keys)) == 7  # equal prompts, even those of other requests: other seeds
            trajectory = await proxy.seal(cap)
            matches_engine_log(proxy.engine, cap, trajectory)
            assert len(trajectory.samples) == len(trajectory.turns) == 7
            assert all(t.parent == -1 and not t.fork for t in trajectory.turns)
            structural = set(proxy.renderer.codec.structural.values())
            row = trajectory.samples[0]
            for token, kind in zip(row.tokens, row.provenance, strict=True):
                assert kind != "o" or token not in structural

    asyncio.run(main())


def test_a_chat_has_the_logprobs_that_were_sampled(folder):
    """Of each choice, streamed and whole, the end token's too; they are the engine's own."""

    async def main():
        async with running(folder, by_seed(folder)) as (proxy, client):
            for n, stream in enumerate((False, True)):
                cap, asked = proxy.open(f"t.{n}", seed_key="k"), {"logprobs": True, "n": 4}
                answer = await chat(client, cap, USER, stream=stream, top_logprobs=0, **asked)
                if not stream:
                    choices = answer.json()["choices"]
                told: dict[int, list] = {i: [] for i in range(4)}
                chunks = [json.loads(c) for c in frames(answer.text)[:-1]] if stream else ()
                for choice in (c for chunk in chunks for c in chunk["choices"]):
                    told[choice["index"]] += choice["logprobs"]["content"]
                for i, choice in enumerate(choices):
                    logged = choice["logprobs"]["content"]
                    assert not stream or logged == told[i]
                    entry = proxy.engine.log[4 * n + i]
                    assert [t["logprob"] for t in logged] == [s.logprob for s in entry.sampled]
                    assert all(t["top_logprobs"] == [] for t in logged)
                    spelled = b"".join(bytes(t["bytes"]) for t in logged)
                    text = choice["message"]["content"] or ""
                    assert spelled.decode().strip().startswith(text.strip())
                    assert logged[-1]["token"] == "<|im_end|>"
            for wrong in ({"top_logprobs": 3}, {"logprobs": 5}, {"top_logprobs": "x"}):
                answer = await chat(client, cap, USER, **{"logprobs": True, **wrong})
                assert answer.status_code == 400
                assert "top_logprobs" in answer.json()["error"]["message"]
            assert "logprobs" not in (await chat(client, cap, USER)).json()["choices"][0]

    asyncio.run(main())


@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}, {"echo": True}, {"stop": "right"}])
def test_a_stream_of_completions_adds_up(folder, fields):
    async def main():
        seeds = iter((4, 4, 4, 4) if "logprobs" not in fields else (4, 5, 4, 5))
        script = lambda *_: Script("left é 🦊 <think> right sum", split_seed=next(seeds))  # noqa: E731
        async with running(folder, script) as (proxy, client):
            cap, asked = proxy.open("t.0"), {"n": 2, "max_tokens": 99, **fields}
            whole = (await complete(client, cap, "the <|im_end|> fox", **asked)).json()
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
            streamed, chunks = folded(
                (await complete(client, cap, "the <|im_end|> fox", **asked)).text
            )
            assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
            begin = "the <|im_end|> fox" if "echo" in fields else ""
            said = "left é 🦊 <think> " + ("" if "stop" in fields else "right sum")
            for n, choice in enumerate(whole["choices"]):
                assert choice["text"] == begin + said == streamed[n]["text"]
                assert choice["finish_reason"] == streamed[n]["finish_reason"] == "stop"
                logged, entry = choice["logprobs"], proxy.engine.log[n].sampled
                if "logprobs" not in fields:
                    assert logged is None
                    continue
                assert logged["token_logprobs"] == [s.logprob for s in entry]
                assert streamed[n]["logprobs"] == logged | {"top_logprobs": []}
                assert logged["top_logprobs"] is None
                spelled = b"".join(  # what a token begins with stands at its offset
                    bytes.fromhex(t[6:].replace("\\x", ""))
                    if t.startswith("bytes:")
                    else t.encode()
                    for t in logged["tokens"][:-1]
                )
                assert spelled.decode() == said
                for token, at in zip(logged["tokens"][:-1], logged["text_offset"], strict=False):
                    assert token.startswith("bytes:") or said.startswith(token, at)
            trajectory = await proxy.seal(cap)
            assert trajectory.conservation.trained == trajectory.conservation.sampled
            assert len(trajectory.samples) == 4

    asyncio.run(main())


WRONG = [
    ({"prompt": None}, "prompt must be"), ({}, "prompt must be"),
    ({"prompt": []}, "prompt must be"),
    ({"prompt": [[]]}, "prompt must be"), ({"prompt": [1, "a"]}, "prompt must be"),
    ({"prompt": [True]}, "prompt must be"), ({"prompt": [-1]}, "prompt must be"),
    ({"prompt": [1 << 40]}, "prompt must be"), ({"prompt": {"a": 1}}, "prompt must be"),
    ({"prompt": [10**6]}, "those of the tokenizer"), ({"prompt": ""}, "must have tokens"),
    ({"prompt": ["a"] * 65, "n": 2}, "at most 128"), ({"prompt": "a", "n": 10**9}, "at most 128"),
    ({"prompt": "a", "logprobs": 1}, "logprobs must be 0"),
    ({"prompt": "a", "logprobs": False}, "logprobs must be 0"),
    ({"prompt": "a", "logprobs": 0, "echo": True}, "logprobs must be 0"),
    ({"prompt": "a", "suffix": "b"}, "suffix"), ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"), ({"prompt": "a", "stop": [1]}, "stop must"),
    ({"prompt": "left " * 3000}, "maximum context length"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), WRONG)
def test_what_cannot_be_exact_is_refused(folders, body, says):
    async def main():
        async with running(folders["words"], ["x"]) as (proxy, client):
            cap = proxy.open("t.0")
            answer = await client.post(f"/s/{cap}/v1/completions", json=body)
            assert answer.status_code == 400 and says in answer.json()["error"]["message"]
            assert not proxy.live(cap).session.nodes and not proxy.engine.log

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=20)
    | st.lists(st.sampled_from(["<|im_end|>", "<|begin_of_text|>", "<think>", "a", " ", "\n"])).map(
        "".join
    )
)
@pytest.mark.parametrize("name", ["bpe", "llama3_1", "mistral_tekken"])
def test_any_text_is_a_prompt(renderers, name, text):
    """The tokenizer's own ids, at most one token that begins a text, provenance beside each."""
    codec = renderers[name].codec
    if not codec.full.encode(text).ids:
        with pytest.raises(BadRequest):
            codec.raw(text)
        return
    ids, kinds = codec.raw(text)
    plain = codec.full.encode(text, add_special_tokens=False).ids
    begin = codec.full.encode("a").ids[:-1]
    assert list(ids) == (plain if plain[: len(begin)] == begin else begin + plain)
    assert [k == "c" for k in kinds] == [i in codec.names for i in ids]


def test_a_completion_is_no_place_of_a_chat(folders):
    """A chat after it begins anew, without a fork; what it said is not known as a reply."""

    async def main():
        async with running(folders["words"], ["left", "right", "left", "sum"]) as (proxy, client):
            cap = proxy.open("t.0")
            await complete(client, cap, "of")
            first = (await chat(client, cap)).json()["choices"][0]["message"]
            await complete(client, cap, "of")
            await chat(client, cap, [*USER, first, {"role": "user", "content": "left"},
                                     {"role": "assistant", "content": "left"},
                                     {"role": "user", "content": "on"}])  # fmt: skip
            trajectory = await proxy.seal(cap)
            assert [t.fork for t in trajectory.turns] == ["", "", "", "assistant_edited"]
            assert "f" in trajectory.samples[-1].provenance
            assert "r" not in trajectory.samples[-1].provenance
            assert trajectory.conservation.trained == trajectory.conservation.sampled

    asyncio.run(main())


def test_the_same_body_on_another_route_is_another_request(folders):
    async def main():
        folder = folders["words"]
        proxy = Proxy(ScriptedEngine(folder, ["left", "right"]), Renderer(folder))
        async with serve(proxy, app=create_app(proxy)) as url, httpx.AsyncClient() as client:
            cap = proxy.open("t.0")
            body = json.dumps({"messages": USER, "prompt": "of", "max_tokens": 9}).encode()
            await hang_up(url, cap, body, 0.05)
            await asyncio.sleep(0.1)
            answer = await client.post(f"{proxy.base_url(cap)}/completions", content=body)
            assert answer.json()["choices"][0]["text"] == "right"

    asyncio.run(main())


def test_parse_is_of_prompts_only():
    request = completions.parse(b'{"prompt": [[1, 2], "a"], "n": 3, "nanoswe_session": "x"}')
    assert request.prompts == [[1, 2], "a"] and request.n == 3 and not request.messages
    assert request.requested == {"max_tokens": 16, "n": 3}


@pytest.mark.parametrize("limit", ["max_calls", "max_sessions"])
def test_a_proxy_without_room_for_anything_is_refused(folders, limit):
    with pytest.raises(BadRequest, match="at least 1"):
        Proxy(ScriptedEngine(folders["words"], []), Renderer(folders["words"]), **{limit: 0})
