"""The log: the state is a function of it, whole or cut at any byte; what cannot be written is not
half written.
"""

import os
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from test_session import served

from nanoswe_proxy import export, wire
from nanoswe_proxy.engine.base import Sampled
from nanoswe_proxy.errors import LogError
from nanoswe_proxy.log import MAGIC, Log, read
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.session import Session
from nanoswe_proxy.state import Policy, replay

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat %s"}}\n</tool_call>'
USER = [{"role": "system", "content": "S"}, {"role": "user", "content": "gö"}]


def described(state):
    """Everything that a state holds, as plain data."""

    def plain(node):
        children = [c.index for c in node.children]
        parent = node.parent.index if node.parent else None
        return {
            name: list(value) if name in ("ids", "logprobs") else value
            for name in node.__slots__
            if (value := getattr(node, name)) is not None
        } | {"children": children, "parent": parent}

    whole = (state.cap, state.policy, state.max_context, state.notes, state.sealed)
    prompts = {name: context.index for name, context in state.prompts.items()}
    return (*whole, state.longest, prompts, [plain(n) for n in state.nodes])


def recorded(path, renderer):
    """A session with a tool call, a fork, an undelivered reply, an abort, completions, a note."""
    session = Session.open("cap", Policy("t.0", 0, "s", 1.0, 40), renderer, 4096, Log(path))

    def say(wired, text, version):
        call = session.prepare(wire.normalise(wired), None, {"model": "é"})
        ids = renderer.codec.full.encode(text, add_special_tokens=False).ids
        for i, token in enumerate([*ids, renderer.end_id][: call.sampling.max_tokens]):
            session.feed(call, Sampled(token, -token / 1024, version + (i > 2)))
        return call, served(session.commit(call))

    call, message = say(USER, CALL % "left", 0)
    session.delivered(call)
    wired = [*USER, message, {"role": "tool", "tool_call_id": "x", "content": "1 <|im_end|>"}]
    say(wired, "return left", 1)
    say([USER[0], {"role": "user", "content": "other"}], "right", 1)
    running = session.prepare(wire.normalise(wired), None, {})
    session.feed(running, Sampled(5, -1.0, 3))
    session.abort(running)
    for cut in (False, True):  # two replies to a prompt of the client's own, twice
        pair = session.admit([session.raw("left right")], 0, 0, {"n": 2}, "d", 2)
        for call in pair:
            session.feed(call, Sampled(renderer.end_id, -1.0, 4))
        session.commit(pair[0])
        session.delivered(pair[0])
        if not cut:
            session.commit(pair[1])
    session.abort(pair[1])
    session.annotate({"reward": 0.5})
    return session


def test_state_is_a_function_of_the_log(renderer, tmp_path):
    path = tmp_path / "a.log"
    session = recorded(path, renderer)
    assert described(replay(read(path).records)) == described(session)
    trajectory = session.seal()
    contents = read(path)
    assert not contents.torn and contents.size == path.stat().st_size
    again = export.trajectory(replay(contents.records))
    assert again.to_json() == trajectory.to_json()
    assert again.notes == {"reward": 0.5} and again.incomplete == ()
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_truncation_at_every_byte(folders, renderer, tmp_path):
    """Whatever was cut off: the state is one that was, marked incomplete, and can go on."""
    path, cut = tmp_path / "a.log", tmp_path / "cut.log"
    recorded(path, renderer).seal()
    data = path.read_bytes()
    states = set()
    for size in range(len(data)):
        contents = read(SimpleNamespace(read_bytes=lambda size=size: data[:size]))  # as of a file
        assert contents.size <= size and contents.torn == (contents.size < size)
        if not contents.records:
            with pytest.raises(LogError, match="before its session was opened"):
                replay(contents.records)
            continue
        if len(contents.records) in states:
            continue  # nothing new since the last byte
        states.add(len(contents.records))
        cut.write_bytes(data[:size])
        trajectory = export.trajectory(replay(contents.records))
        assert "not sealed" in trajectory.incomplete
        session = Session.resume(contents.records, renderer, Log(cut, contents))
        lost = sum(n.stop == "lost" for n in session.generations())
        call = session.prepare(wire.normalise(USER), None, {})
        session.feed(call, Sampled(renderer.end_id, -1.0, 9))
        session.commit(call)
        session.delivered(call)
        sealed = session.seal()
        assert len(sealed.incomplete) == lost
        assert sealed.conservation.trained >= 1
        assert export.trajectory(replay(read(cut).records)).to_json() == sealed.to_json()
    assert states == set(range(1, len(read(path).records)))


@pytest.mark.parametrize("at", [0, 20, 200, -1])
def test_a_changed_byte_ends_the_log(renderer, tmp_path, at):
    path = tmp_path / "a.log"
    recorded(path, renderer)
    data = bytearray(path.read_bytes())
    before = len(read(path).records)
    data[at] ^= 1
    path.write_bytes(data)
    if at == 0:
        with pytest.raises(LogError, match=r"a\.log is no session log"):
            read(path)
    else:
        assert read(path).torn and len(read(path).records) < before


def test_a_record_that_does_not_fit_leaves_no_trace(renderer, tmp_path, monkeypatch):
    path = tmp_path / "a.log"
    session = recorded(path, renderer)
    data, state = path.read_bytes(), described(session)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, b, at: whole(fd, b[:7], at))
    with pytest.raises(LogError, match="only 7 of"):
        session.annotate({"reward": 1})
    monkeypatch.undo()
    assert path.read_bytes() == data and described(session) == state
    session.annotate({"reward": 1})
    assert replay(read(path).records).notes == {"reward": 1}


def test_wrong_files(tmp_path):
    older = MAGIC.replace(b"/3", b"/2") + b"whatever"
    for data, says in ((b"hello", "no session log"), (b"", None), (MAGIC[:5], None),
                       (older, r"nanoswe-session/3: replay an older one with")):  # fmt: skip
        path = tmp_path / "x.log"
        path.write_bytes(data)
        if says:
            with pytest.raises(LogError, match=says):
                read(path)
        else:
            assert read(path).records == []
    newer = Log(tmp_path / "n.log")
    newer.append({"type": "open", "cap": "c", "max_context": 9, "about": {},
                  "policy": asdict(Policy("t", 0, "s", 1.0, 4))})  # fmt: skip
    newer.append({"type": "dream"})
    with pytest.raises(LogError, match="dream"):
        replay(read(tmp_path / "n.log").records)


def test_bytes_per_token(folders, tmp_path):
    """Log and memory: 4 bytes an id, 1 of provenance, 4 a logprob; text is kept once."""
    renderer, path = Renderer(folders["bpe"]), tmp_path / "a.log"
    session = Session.open("c", Policy("t.0", 0, "s", 1.0, 2000), renderer, 10**6, Log(path))
    call = session.prepare(wire.normalise(USER), None, {})
    for _ in range(1999):
        session.feed(call, Sampled(70, -1.0, 0))
    session.feed(call, Sampled(renderer.end_id, -1.0, 0))
    before = path.stat().st_size
    session.commit(call)
    text = len(call.node.view["content"].encode())
    assert path.stat().st_size - before <= 8 * 2000 + text + 200
    held = sum(map(sys.getsizeof, (call.node.ids, call.node.logprobs, call.node.versions)))
    assert held <= 8.2 * 2000  # arrays, without the room that they grew by
