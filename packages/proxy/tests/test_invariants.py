"""Invariants of the design that no other file holds as a property: edits and forks (11, 12),
interleaving (10), interruption (13), linear work (16), one BOS and legal turns (17, 18).
`docs/invariants.md` tells where each of the others is held.
"""

import asyncio
import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_log import described
from test_session import USER, ask, encode, new_session, say

from nanoswe_proxy import tree, wire
from nanoswe_proxy.dialects import chat
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.exchange import follow
from nanoswe_proxy.log import read
from nanoswe_proxy.proxy import SHORT_TAIL, Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.state import replay

FAMILIES = ["qwen2_5", "qwen3", "llama3_1", "glm4moe", "nemotron_3_nano"]
FEW = settings(max_examples=15, deadline=None)


def conversation(session, turns=3):
    """Messages after some turns, the last one a user's; a reply has white space around it."""
    wired = [USER[0], {"role": "user", "content": "where we start"}]
    thought = "so</think>\n\n" if session.renderer.family.grammar.thinking else ""
    for n in range(turns):
        _, _, message = say(session, wired, f"{thought} reply {n} left\n")
        wired += [message, {"role": "user", "content": f"question {n} right"}]
    return wired


# What an agent does to a message that stays the same one, and what makes another of it.
ACCEPTED = {
    "trimmed": lambda m: m | {"content": m["content"].strip()},
    "parts": lambda m: m | {"content": [{"type": "text", "text": m["content"]}]},
    "marked": lambda m: m | {"cache_control": {"type": "ephemeral"}},
    "nulls": lambda m: m | {"name": None, "tool_calls": None, "refusal": None},
    "same": lambda m: m,
}
REJECTED = {
    "a word": lambda m: m | {"content": m["content"].replace("e", "a")},
    "case": lambda m: m | {"content": m["content"].upper()},
    "more": lambda m: m | {"content": m["content"] + " more"},
    "inside": lambda m: m | {"content": m["content"].replace(" ", "  ", 2).replace("r", "", 1)},
    "nothing": lambda m: m | {"content": "gone"},
}


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(at=st.integers(1, 6), how=st.sampled_from([*ACCEPTED, *REJECTED]))
def test_an_edit_forks_exactly_where_it_means_something(renderers, name, at, how):
    session = new_session(renderers[name], max_tokens=200)
    wired = conversation(session)
    before = [n.index for n in session.generations()]
    edited = [dict(m) for m in wired]
    edited[at] = (ACCEPTED | REJECTED)[how](edited[at])
    call, _, _ = say(session, edited, "on")
    path = tree.path(call.node)[:-1]
    kept = [n.index for n in path if isinstance(n, tree.Generation)]
    if how in ACCEPTED:
        assert kept == before and call.node.parent.fork == ""
    else:
        assert call.node.parent.fork in ("assistant_edited", "observation_edited")
        assert kept == before[: (at - 1) // 2]  # not one node from the edit on
    # whatever happened, the path says what was sent: nothing was merged into something else
    said = [m for node in path for m in node.messages]
    for mine, sent in zip(said, wire.normalise(edited), strict=True):
        assert wire.level_of(mine, sent) <= wire.LOSSY


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(order=st.permutations([0] * 3 + [1] * 3 + [2] * 3))
def test_lineages_do_not_feel_each_other(renderers, name, order):
    """Three conversations under one URL, in any order: rows as of one after the other."""

    def rows(order):
        session = new_session(renderers[name], max_tokens=200)
        wired = [[{"role": "user", "content": f"lineage {n}"}] for n in range(3)]
        for n in order:
            turn = len(wired[n])
            _, _, message = ask(session, wired[n], encode(session.renderer, f"left {n} {turn}"))
            wired[n] += [message, {"role": "user", "content": f"{n} {turn}"}]
        return sorted((s.tokens, s.provenance, s.logprobs[-1]) for s in session.seal().samples)

    assert rows(order) == rows(sorted(order))


@pytest.mark.parametrize("name", FAMILIES)
def test_work_and_bytes_are_of_what_is_new(renderers, family_folders, name, tmp_path, monkeypatch):
    """Turn after turn the same characters are encoded and the same bytes are logged: counted."""
    renderer = renderers[name]
    proxy = Proxy(ScriptedEngine(family_folders[name], lambda *_: "left right"), renderer,
                  tmp_path)  # fmt: skip
    encoded, counted = [], renderer.codec.encode

    def counting(marked, *rest):
        encoded[-1] += len(marked)
        return counted(marked, *rest)

    monkeypatch.setattr(renderer.codec, "encode", counting)

    async def main():
        cap, wired, sizes = proxy.open("t.0"), [dict(m) for m in USER], []
        (path,) = tmp_path.glob("*.log")
        for turn in range(10, 40):
            encoded.append(0)
            raw = wire.json.dumps({"messages": wired}).encode()
            exchange = await proxy.call(cap, raw, chat.parse(raw))
            async for _ in follow(exchange):
                pass
            proxy.delivered(cap, exchange)
            said = exchange.calls[0].node.view["content"]
            wired += [{"role": "assistant", "content": said},
                      {"role": "user", "content": f"go on {turn}"}]  # fmt: skip
            sizes.append(path.stat().st_size)
        await proxy.seal(cap)
        assert len(set(encoded[2:])) == 1
        grown = [b - a for a, b in itertools.pairwise(sizes)][2:]
        assert max(grown) - min(grown) < 20  # the digits of positions

    asyncio.run(main())


def test_only_a_short_tail_is_encoded_on_the_loop(folders, monkeypatch):
    """Whatever may take long is encoded in a thread: a history from nothing, a long observation, a
    tail after a long reply or with a reply in it. The rest would only lose time on the way there.
    """
    renderer = Renderer(folders["bpe"])
    said = {"ids": "left"}
    engine = ScriptedEngine(folders["bpe"], lambda *_: Script(said["ids"], close=True))
    proxy, where = Proxy(engine, renderer, max_tokens=4000), []
    for name in ("root", "tail"):

        def noting(*given, how=getattr(renderer, name), name=name):
            on_loop = threading.current_thread() is threading.main_thread()
            where.append((name, "loop" if on_loop else "thread"))
            return how(*given)

        monkeypatch.setattr(renderer, name, noting)

    async def main():
        cap, wired = proxy.open("t.0"), [dict(m) for m in USER]

        async def turn(*then):
            raw = wire.json.dumps({"messages": [*wired, *then]}).encode()
            exchange = await proxy.call(cap, raw, chat.parse(raw))
            await exchange.task
            node = exchange.calls[0].node
            wired[:] = [*wired, *then, {"role": "assistant", "content": node.view["content"]}]
            return len(node.ids)

        sampled = await turn()
        assert where == [("root", "thread")]
        most = SHORT_TAIL - sampled - 1
        sampled = await turn({"role": "user", "content": "x" * most})
        await turn({"role": "user", "content": "x" * (SHORT_TAIL - sampled)})
        assert where[1:] == [("tail", "loop"), ("tail", "thread")]
        said["ids"] = "left " * SHORT_TAIL
        assert await turn({"role": "user", "content": "more"}) >= SHORT_TAIL
        said["ids"] = "left"
        await turn({"role": "user", "content": "again"})
        assert where[3:] == [("tail", "loop"), ("tail", "thread")]
        guest = {"role": "assistant", "content": "told by another"}
        await turn({"role": "user", "content": "a"}, guest, {"role": "user", "content": "b"})
        assert where[5:] == [("tail", "thread")]

    asyncio.run(main())


def test_a_call_may_be_cut_off_anywhere(folders, tmp_path):
    """After every number of the loop's turns, from none to more than the call takes, the call is
    cancelled: what is in memory is what is logged, every sampled token is accounted for, and the
    session goes on. The cuts meet the call before its node, while it samples, and after its end.
    """
    folder, renderer, met = folders["bpe"], Renderer(folders["bpe"]), set()

    async def main(ticks, logs):
        engine = ScriptedEngine(folder, lambda *_: Script("left right left", token_delay_sec=1e-9))
        proxy = Proxy(engine, renderer, logs)
        cap = proxy.open("t.0")
        raw = wire.json.dumps({"messages": USER}).encode()
        session = proxy.live(cap).session

        async def ask_once():
            exchange, done = await proxy.call(cap, raw, chat.parse(raw)), False
            try:
                async for _ in follow(exchange):
                    pass
                proxy.delivered(cap, exchange)
                done = True
            finally:
                if not done:
                    proxy.undelivered(cap, exchange, begun=True)

        first = asyncio.create_task(ask_once())
        for _ in range(ticks):
            await asyncio.sleep(0)
        states = {(n.delivery, bool(n.ids)) for n in session.generations()}
        met.update(states or {("none", False)})
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        while proxy.live(cap).running:
            await asyncio.sleep(0)
        (path,) = logs.glob("*.log")
        assert described(replay(read(path).records)) == described(session)
        before = {n.index: n.delivery for n in session.generations()}
        assert set(before.values()) <= {"aborted", "committed", "delivered"}
        await ask_once()
        trajectory = await proxy.seal(cap)
        sampled = sum(len(e.sampled) for e in engine.log)
        # a token that was under way when its call was cut off was never received
        assert sampled - 1 <= trajectory.conservation.sampled <= sampled
        assert trajectory.turns[-1].delivery in ("delivered", "acknowledged")

    wanted = {("none", False), ("sampling", False), ("sampling", True), ("delivered", True)}
    for ticks in range(400):  # a thread of the call's takes as many turns as it likes
        logs = tmp_path / str(ticks)
        logs.mkdir()
        asyncio.run(main(ticks % 200, logs))
        if wanted <= met:
            break
    assert wanted <= met


CYCLES = {  # structural tokens that take turns in every row
    "qwen2_5": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "nemotron_3_nano": ["<|im_start|>", "<|im_end|>"],
    "llama3_1": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(most=st.lists(st.sampled_from([2, 200]), min_size=1, max_size=4), hostile=st.booleans())
def test_turns_alternate_and_the_text_begins_once(renderers, name, most, hostile):
    """Whole turns and turns that were cut off, content that spells tokens: a row is legal."""
    renderer = renderers[name]
    session, wired = new_session(renderer, max_tokens=200), [dict(m) for m in USER]
    for n in most:
        _, _, message = ask(session, wired, encode(renderer, "left right sum"), most=n)
        spelled = " ".join(renderer.codec.structural) if hostile else "go"
        wired += [message, {"role": "user", "content": spelled}]
    say(session, wired, "end")
    (row,) = session.seal().samples
    names = [renderer.codec.names[i] for i in row.tokens if i in renderer.codec.names]
    begins = [t for t in names if t in ("<|begin_of_text|>", "[gMASK]")]
    assert len(begins) <= 1 and names[: len(begins)] == begins
    if cycle := CYCLES.get(name):
        turning = [t for t in names if t in cycle]
        assert all(t == cycle[i % len(cycle)] for i, t in enumerate(turning))
        assert turning.count(cycle[0]) == 2 + 2 * len(most) + 1
    else:  # GLM: a role's token opens a turn, the next one's ends it
        roles = [t for t in names if t in ("<|user|>", "<|assistant|>")]
        assert all(a != b for a, b in itertools.pairwise(roles))
    for kind, logprob, mask in zip(row.provenance, row.logprobs, row.mask, strict=True):
        assert (kind == "s") == mask == (logprob == logprob)  # 19: nothing else has a logprob
