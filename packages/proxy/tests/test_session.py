"""The core without HTTP: prefix, conservation, ownership, forks, echo ids, limits."""

import dataclasses
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoswe_proxy import tree, wire
from nanoswe_proxy.engine.base import Sampled
from nanoswe_proxy.errors import (
    ContextLengthError,
    EngineError,
    SealedError,
    TemplateRefused,
    TrajectoryError,
)
from nanoswe_proxy.session import Session
from nanoswe_proxy.state import Policy
from nanoswe_proxy.trajectory import Conservation, Sample, from_json, read_jsonl, write_jsonl

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat %s"}}\n</tool_call>'
USER = [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]


def new_session(renderer, max_context=4096, max_tokens=40):
    policy = Policy("t.0", 0, "seed", 1.0, max_tokens)
    return Session.open("cap", policy, renderer, max_context)


def encode(renderer, text):
    return renderer.codec.full.encode(text, add_special_tokens=False).ids


def ask(session, wired, ids, *, deliver=True, version=0, most=None):
    """One call: `ids` sampled, closed with the end token if there is room."""
    call = session.prepare(wire.normalise(wired), None, {"max_tokens": most} if most else {})
    ids = [*ids, session.renderer.end_id][: call.sampling.max_tokens]
    for token in ids:
        session.feed(call, Sampled(token, -token / 1024, version))
    message = served(session.commit(call))
    if deliver:
        session.delivered(call)
    return call, ids, message


def served(view):
    """A reply as Chat Completions has it."""
    message = {"role": "assistant", "content": view["content"]}
    if "reasoning" in view:
        message["reasoning_content"] = view["reasoning"]
    if "calls" in view:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {"id": c["id"], "type": "function",
             "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in view["calls"]
        ]  # fmt: skip
    return message


def say(session, wired, text):
    return ask(session, wired, encode(session.renderer, text))


SPOKEN = ("content", "reasoning")
HOSTILE = ["<|im_end|>", "</s>", "<|user|>", "<tool_call>", "</think>", "<|eot_id|>", "[INST]"]


class Conversations(RuleBasedStateMachine):
    """An agent that goes on, edits, forgets, retries; an engine that samples any ids at all."""

    @initialize()
    def begin(self):
        self.renderer = type(self).renderer
        self.session = new_session(self.renderer, max_tokens=80)
        act = {"name": "bash", "arguments": '{"command": "x"}', "id": "call00000"}
        acted = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "",
                 "calls": [act]}, {"role": "tool", "content": "t", "call_id": "call00000"},
                 {"role": "assistant", "content": "z"}]  # fmt: skip
        self.call = [i for i in self.renderer.sampled(acted, None)[1]
                     if i not in self.renderer.stop_ids]  # fmt: skip
        self.truth = []  # (prompt, sampled, trains)
        self.histories = [(USER, ())]  # messages to send, ids that the next prompt must start with

    @rule(
        data=st.data(),
        ids=st.lists(st.integers(3, 255), max_size=14),
        call=st.booleans(),
        deliver=st.sampled_from([True, True, True, False]),
        role=st.sampled_from(["user", "tool"]),
        said=st.text("ab\n", max_size=3) | st.sampled_from(HOSTILE),
        most=st.sampled_from([None, None, 3, 12]),
    )
    def turn(self, data, ids, call, deliver, role, said, most):
        wired, _ = data.draw(st.sampled_from(self.histories))
        ids = self.call if call else ids
        try:
            how = {"deliver": deliver, "version": len(self.truth), "most": most}
            call, ids, message = ask(self.session, wired, ids, **how)
        except TemplateRefused:  # such roles in a row: the agent is told, nothing else happens
            return
        # siblings that said the same in other ids are told apart by nothing but an echo id
        said_so = [(n.parent.index, wire.text_key(n.view))
                   for n in self.session.generations() if n.committed]  # fmt: skip
        prefixes = [p for w, p in self.histories if w == wired]
        kept = any(tuple(call.ids[: len(p)]) == p for p in prefixes)
        alike = len(set(said_so)) < len(said_so)
        assert kept or alike or call.node.parent.fork in self.rewritten
        told = {k: "".join(d.text for d in call.deltas if d.kind == k) for k in SPOKEN}
        assert told == {k: call.node.view.get(k, "") for k in SPOKEN}  # the stream is the reply
        names = [d.text for d in call.deltas if d.kind == "call_name"]
        assert names == [c["name"] for c in call.node.view.get("calls", ())]
        self.truth.append([call, tuple(ids), deliver])
        for entry in self.truth:  # what this request replays was delivered, whatever we were told
            entry[2] |= entry[0].node.delivery == "acknowledged"
        after = [*wired, message, {"role": role, "content": said, "tool_call_id": "?"}]
        self.histories.append((after, (*call.ids, *ids)))

    @rule(data=st.data())
    def edit(self, data):
        wired, _ = data.draw(st.sampled_from(self.histories))
        at = data.draw(st.integers(0, len(wired) - 1))
        edited = [dict(m) for m in wired]
        edited[at]["content"] = f"{edited[at].get('content') or ''} edited"
        self.histories.append((edited, ()))

    @rule(data=st.data())
    def condense(self, data):
        wired, _ = data.draw(st.sampled_from(self.histories))
        if len(wired) > 4:
            self.histories.append(
                ([*USER, {"role": "user", "content": "summary"}, *wired[-2:]], ())
            )

    @rule(data=st.data(), first=st.booleans())
    def overlap(self, data, first):
        """Two calls at once; whoever ends first, each has its own prompt and its own ids."""
        calls = []
        for n in range(2):
            wired, _ = data.draw(st.sampled_from(self.histories))
            try:
                calls.append((self.session.prepare(wire.normalise(wired), None, {}), [7 + n, 9]))
            except TemplateRefused:
                return self._drop(calls)
        for at in range(2):
            for call, ids in calls:
                self.session.feed(call, Sampled(ids[at], -ids[at] / 1024, len(self.truth)))
        for call, ids in calls if first else reversed(calls):
            ids.append(self.renderer.end_id)
            self.session.feed(call, Sampled(ids[-1], -ids[-1] / 1024, len(self.truth)))
            self.session.commit(call)
            self.session.delivered(call)
        self.truth += [[call, tuple(ids), True] for call, ids in calls]

    @rule(data=st.data(), n=st.integers(2, 4), order=st.permutations(range(4)), on=st.booleans())
    def choices(self, data, n, order, on):
        """Replies to one request: siblings after one prompt, ended in any order, each its own."""
        wired, _ = data.draw(st.sampled_from(self.histories))
        messages, version = wire.normalise(wired), len(self.truth)
        place = self.session.locate(messages, None)
        try:
            context = self.session.draft(place, messages)
        except TemplateRefused:
            return
        calls = self.session.admit([context], place.level, len(messages), {"n": n}, n=n)
        assert len({id(c.node.parent) for c in calls}) == 1 and [c.node.choice for c in calls] == [
            *range(n)
        ]
        assert len({c.sampling.seed_key for c in calls}) == n
        said = [[*self.call, 11 + i, self.renderer.end_id] for i in range(n)]
        for i in (i for i in order if i < n):
            for token in said[i]:
                self.session.feed(calls[i], Sampled(token, -token / 1024, version))
        told = [served(self.session.commit(calls[i])) for i in range(n)]
        minted = [c["id"] for message in told for c in message.get("tool_calls", ())]
        assert len(set(minted)) == len(minted)
        for call, ids in zip(calls, said, strict=True):
            self.session.delivered(call)
            self.truth.append([call, tuple(ids), True])
        if on:  # the agent goes on from one of them
            i = order[0] % n
            after = [*wired, told[i], {"role": "tool", "content": "t", "tool_call_id": "?"}]
            self.histories.append((after, (*calls[i].ids, *said[i])))

    def _drop(self, calls):
        for call, _ in calls:
            self.session.abort(call)
            self.truth.append([call, (), False])

    @rule(data=st.data(), n=st.integers(0, 3))
    def abort(self, data, n):
        wired, _ = data.draw(st.sampled_from(self.histories))
        try:
            call = self.session.prepare(wire.normalise(wired), None, {})
        except TemplateRefused:
            return
        for token in range(n):
            self.session.feed(call, Sampled(token + 3, -1.0, len(self.truth)))
        self.session.abort(call)
        self.truth.append([call, tuple(call.node.ids), False])

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def indexes_hold(self):
        assert [n.index for n in self.session.nodes] == list(range(len(self.session.nodes)))

    def teardown(self):
        if not hasattr(self, "session"):
            return
        trajectory = self.session.seal()
        for entry in self.truth:
            entry[2] |= entry[0].node.delivery == "acknowledged"
        check(trajectory, self.truth)
        structural = set(self.renderer.codec.structural.values())
        for node in self.session.nodes:  # no observation is structure, whatever it spells
            for token, kind in zip(node.ids, getattr(node, "provenance", ()), strict=False):
                assert kind != "o" or token not in structural
        assert from_json(trajectory.to_json()).to_json() == trajectory.to_json()


def check(trajectory, truth):
    """Every sampled token of a delivered call is trained once, after exactly the prompt it was
    sampled from.
    """
    assert len(trajectory.turns) == len(truth)
    assert trajectory.conservation.sampled == sum(len(ids) for _, ids, _ in truth)
    assert trajectory.conservation.trained == sum(len(ids) for _, ids, trains in truth if trains)
    for turn, (call, ids, trains) in zip(trajectory.turns, truth, strict=True):
        rows = [s for s in trajectory.samples if turn.index in s.stops]
        assert len(rows) == (1 if trains and ids else 0)
        for row in rows:
            n = len(call.ids)
            end = n + len(ids)
            assert row.tokens[:n] == tuple(call.ids) and row.tokens[n:end] == ids
            assert row.turns[n:end] == (turn.index,) * len(ids)
            assert row.logprobs[n:end] == tuple(-t / 1024 for t in ids)
            assert row.mask[n:end] == (True,) * len(ids)


REWRITING = {"glm4moe": {"role_marker_conflict"}, "mistral_tekken": {"template_rewrote"}}
MACHINES = ["bpe", "words", "qwen3", "qwen3_5_think", "nemotron_3_nano", "llama3_1", "glm4moe",
            "mistral_tekken"]  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_conversations(renderers, name):
    facts = {"renderer": renderers[name], "rewritten": REWRITING.get(name, set())}
    case = type("Machine", (Conversations,), facts).TestCase
    case.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
    case("runTest").runTest()


def test_sft_mask_is_the_sampled_mask(renderer):
    """The same conversation by SFT rendering and by sampling: same tokens, same mask."""
    session = new_session(renderer, max_tokens=200)
    wired = list(USER)
    for said, answer in [
        ("so\n" + CALL % "left", "tool"),
        (CALL % "right", "tool"),
        ("done", "user"),
    ]:
        _, _, message = say(session, wired, said)
        wired += [message, {"role": answer, "content": "x\n", "tool_call_id": "1"}]
    del wired[-1]
    (sample,) = session.seal().samples
    rendered = renderer.render_messages(wire.normalise(wired), None)
    assert tuple(i for r in rendered for i in r.ids) == sample.tokens
    assert "".join(r.provenance for r in rendered) == sample.provenance
    assert sum(sample.mask) == sum(len(r.ids) for r in rendered[1::2])


def test_truncated_turn_is_closed_synthetically(renderer):
    session = new_session(renderer, max_tokens=3)
    first, ids, message = ask(session, USER, [70, 71, 72, 73])
    assert ids == [70, 71, 72] and first.node.finish_reason == "length"
    second, _, _ = ask(session, [*USER, message, {"role": "user", "content": "x"}], [])
    assert tuple(second.ids[: len(first.ids) + 4]) == (*first.ids, 70, 71, 72, renderer.end_id)
    trajectory = session.seal()
    assert trajectory.samples[0].provenance[len(first.ids) :].startswith("sssyc")
    assert trajectory.samples[0].stops == {0: "length", 1: "stop"}


def test_half_a_character_is_served_as_nothing_and_kept(renderer):
    session = new_session(renderer, max_tokens=2)
    fox = encode(renderer, "a🦊")
    call, ids, message = ask(session, USER, fox)
    assert ids == fox[:2] and message["content"] == "a"
    assert tuple(call.node.ids) == tuple(fox[:2])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[3].update(content="other"), "observation_edited"),
        (lambda m: m[2].update(content="other"), "assistant_edited"),
        (lambda m: m[0].update(content="other"), "system_changed"),
        (lambda m: m.__delitem__(2), "reply_dropped"),
        (lambda m: m.__setitem__(slice(1, 3), [{"role": "user", "content": "sum"}]), "condensed"),
    ],
)
def test_edited_history_forks_with_a_reason(renderer, change, reason):
    session = new_session(renderer)
    wired = list(USER)
    for said in ("one", "two"):
        _, _, message = say(session, wired, said)
        wired += [message, {"role": "user", "content": "next"}]
    edited = [dict(m) for m in wired]
    change(edited)
    say(session, edited, "three")
    trajectory = session.seal()
    assert [t.fork for t in trajectory.turns] == ["", "", reason]
    assert len(trajectory.samples) == 2
    assert trajectory.conservation.trained == trajectory.conservation.sampled


def test_shared_turn_is_trained_in_the_deepest_row(renderer):
    """one -> (two, three -> four): `one` is owned by the row of `four` and is context for `two`."""
    session = new_session(renderer)
    _, _, one = say(session, USER, "one")
    say(session, [*USER, one, {"role": "user", "content": "a"}], "two")
    wired = [*USER, one, {"role": "user", "content": "b"}]
    _, _, three = say(session, wired, "three")
    say(session, [*wired, three, {"role": "user", "content": "c"}], "four")
    short, deep = session.seal().samples
    assert (set(short.stops), set(deep.stops)) == ({1}, {0, 2, 3})
    assert "r" in short.provenance and "r" not in deep.provenance


def test_changed_tools_fork(renderer):
    session = new_session(renderer)
    say(session, USER, "one")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert session.prepare(wire.normalise(USER), tools, {}).node.parent.fork == "tools_changed"


def test_condensed_history_reuses_sampled_ids(renderer):
    """The reply was sampled in pieces that no tokenizer would choose; it comes back with the same
    ids.
    """
    session = new_session(renderer)
    pieces = [i for c in "return" for i in encode(renderer, c)]
    _, ids, reply = ask(session, USER, pieces)
    wired = [
        USER[0],
        {"role": "user", "content": "summary"},
        reply,
        {"role": "user", "content": "on"},
    ]
    call, _, _ = say(session, wired, "two")
    assert call.node.parent.fork == "observation_edited"
    at = call.node.parent.provenance.index("r")
    assert list(call.ids[at : at + len(ids)]) == ids
    assert session.seal().conservation.masked == {}


def test_wire_normal_differences_do_not_fork(renderer):
    session = new_session(renderer, max_tokens=200)
    two = (
        CALL % "left"
        + "\n"
        + '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "é"}}\n</tool_call>'
    )
    first, ids, message = say(session, USER, two)
    a, b = (c["id"] for c in message["tool_calls"])
    message["tool_calls"][1]["function"]["arguments"] = '{"a":"\\u00e9","b":1}'
    del message["content"]
    results = [  # out of order, as parts, with a cache marker
        {
            "role": "tool",
            "tool_call_id": b,
            "content": [{"type": "text", "text": "2", "cache_control": {}}],
        },
        {"role": "tool", "tool_call_id": a, "content": "1"},
    ]
    second, _, _ = say(session, [*USER, message, *results], "done")
    assert tuple(second.ids[: len(first.ids) + len(ids)]) == (*first.ids, *ids)
    assert renderer.codec.decode(second.ids).index("\n1\n") < renderer.codec.decode(
        second.ids
    ).index("\n2\n")
    assert len(session.seal().samples) == 1


def test_echo_id_tells_equal_replies_apart(renderer):
    """Two siblings said the same in different ids; the id that the client returns decides."""
    session = new_session(renderer, max_tokens=200)
    _, ids, first = say(session, USER, CALL % "return")
    pieces = [i for c in "return" for i in encode(renderer, c)]
    opening, closing = (encode(renderer, part) for part in (CALL % "\0").split("\0"))
    _, others, second = ask(session, USER, [*opening, *pieces, *closing])
    assert first["tool_calls"][0]["function"] == second["tool_calls"][0]["function"]
    assert ids != others
    for message, expected in ((first, ids), (second, others)):
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        call, _, _ = say(session, [*USER, message, answer], "done")
        assert tuple(call.node.parent.parent.ids) == tuple(expected)


def test_forged_echo_id_means_nothing():
    call = {"name": "f", "arguments": "{}", "id": tree.echo_id("mine", 7, 0)}
    assert tree.echoed("mine", {"calls": [call]}) == 7
    assert tree.echoed("other", {"calls": [call]}) is None


def test_malformed_call_is_content(renderer):
    session = new_session(renderer, max_tokens=200)
    said = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat'
    call, _, message = say(session, USER, said)
    assert message == {"role": "assistant", "content": said}
    assert call.node.parse == "malformed" and call.node.finish_reason == "stop"
    assert session.seal().turns[0].parse == "malformed"


def test_retry_gets_new_random_numbers_and_a_rerun_the_same(renderer):
    keys = []
    for _ in range(2):
        session = new_session(renderer)
        keys.append([say(session, USER, "one")[0].sampling.seed_key for _ in range(2)])
    assert keys == [["seed/0.0", "seed/0.1"]] * 2


def test_context_limit(renderer):
    session = new_session(renderer, max_context=40)
    used = len(session.prepare(wire.normalise(USER), None, {}).ids)
    assert session.prepare(wire.normalise(USER), None, {}).sampling.max_tokens == 40 - used
    assert session.prepare(wire.normalise(USER), None, {"max_tokens": 2}).sampling.max_tokens == 2
    nodes = len(session.nodes)
    with pytest.raises(ContextLengthError, match="maximum context length is 40 tokens"):
        session.prepare([{"role": "user", "content": "x y " * 40}], None, {})
    assert len(session.nodes) == nodes


def test_engine_protocol_is_checked(renderer):
    session = new_session(renderer, max_tokens=2)
    call = session.prepare(wire.normalise(USER), None, {})
    for token, logprob, version in (
        (5, math.nan, 0),
        (5, -math.inf, 0),
        (5, -1.0, -1),
        (-5, -1.0, 0),
    ):
        with pytest.raises(EngineError, match="cannot be recorded"):
            session.feed(call, Sampled(token, logprob, version))
    session.feed(call, Sampled(5, -1.0, 3))
    with pytest.raises(EngineError, match="backwards"):
        session.feed(call, Sampled(5, -1.0, 2))
    with pytest.raises(EngineError, match="without a stop"):
        session.commit(call)
    session.feed(call, Sampled(5, -1.0, 4))
    with pytest.raises(EngineError, match="past its stop"):
        session.feed(call, Sampled(5, -1.0, 4))


def test_seal_is_final(renderer):
    session = new_session(renderer)
    running = session.prepare(wire.normalise(USER), None, {})
    session.feed(running, Sampled(5, -1.0, 0))
    say(session, USER, "one")
    trajectory = session.seal()
    assert trajectory.conservation.masked == {"aborted": 1}
    for attempt in (
        lambda: session.feed(running, Sampled(5, -1.0, 0)),
        lambda: session.commit(running),
        lambda: session.prepare(wire.normalise(USER), None, {}),
    ):
        with pytest.raises(SealedError):
            attempt()
    assert session.seal().to_json() == trajectory.to_json()


def test_records_refuse_what_does_not_line_up(renderer, tmp_path):
    session = new_session(renderer)
    say(session, USER, "one")
    trajectory = session.seal()
    row = trajectory.samples[0]
    for change in (
        {"tokens": row.tokens[1:]},
        {"provenance": "s" * len(row.tokens)},
        {"logprobs": (0.0,) * len(row.tokens)},
        {"stops": {}},
    ):
        with pytest.raises(TrajectoryError):
            dataclasses.replace(row, **change)
    with pytest.raises(TrajectoryError):
        Conservation(3, 1, {"aborted": 1})
    with pytest.raises(TrajectoryError, match="owned by two rows"):
        dataclasses.replace(trajectory, samples=(row, row))
    with pytest.raises(TrajectoryError, match="trajectory/2"):
        from_json(trajectory.to_json().replace("trajectory/1", "trajectory/2"))
    write_jsonl(tmp_path / "t.jsonl", trajectory, trajectory)
    assert [t.to_json() for t in read_jsonl(tmp_path / "t.jsonl")] == [trajectory.to_json()] * 2
    assert isinstance(row, Sample)
