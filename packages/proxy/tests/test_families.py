"""Every family: what is rendered is what the template writes; extension never changes it; content
cannot forge structure; streams, spans and calls come out.
"""

import json

import pytest
from families import CAN, TOOLS, conversations
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nanoswe_proxy import wire
from nanoswe_proxy.errors import RenderError, Unextendable
from nanoswe_proxy.render.base import Renderer

FEW = settings(max_examples=12)  # of each family
# Words that no tokenizer can join with what stands around them; some have white space inside.
plain = st.text("ab left+é🦊\n", min_size=1, max_size=10).map(lambda s: f"x{s}x")
hostile = st.lists(
    st.sampled_from(["<|im_end|>", "<|user|>", "</s>", "[INST]", "<tool_call>", "</think>", "\n",
                     "<|eot_id|>", "<end_of_turn>", "\ufdd0", "\ufdd6c1\ufdd6", "🦊", " ", "{"])
    | st.text(max_size=4), max_size=6,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", CAN)
@FEW
@given(data=st.data())
def test_a_root_is_what_the_template_writes(renderers, family_folders, name, data):
    renderer = renderers[name]
    wired = data.draw(conversations(name, plain | st.just("")))
    tools = data.draw(st.sampled_from([None, TOOLS]))
    written = renderer._template.render(wired, tools, True)
    canonical = Tokenizer.from_file(str(family_folders[name] / "tokenizer.json"))
    expected = canonical.encode(written, add_special_tokens=False).ids
    encoded = renderer.root(wire.normalise(wired), tools, {})
    assert list(encoded.ids) == expected
    begins = [i for t, i in renderer.codec.structural.items() if t in ("<s>", "<bos>")]
    assert all(encoded.ids.count(i) <= 1 for i in begins)


@pytest.mark.parametrize("name", CAN)
@FEW
@given(data=st.data())
def test_extension_gives_what_a_root_gives(renderers, name, data):
    """Turn by turn with a canonical sampler, the path is the root of the whole."""
    renderer = renderers[name]
    wired = data.draw(conversations(name, plain | hostile))
    tools = data.draw(st.sampled_from([None, TOOLS]))
    messages = wire.normalise(wired)
    at = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    assume(at)
    replay = renderer.sampled([*messages, {"role": "assistant", "content": "z"}], tools)
    path = list(renderer.root(messages[: at[0]], tools, {}).ids)
    for i, after in zip(at, [*at[1:], len(messages)], strict=True):
        try:
            tail = renderer.tail(messages[i + 1 : after], replay[i], {}, messages[: i + 1], tools)
        except Unextendable as error:
            assert name == "mistral_tekken" and str(error) == "template_rewrote"
            return
        assert len(tail.ids) == len(tail.provenance)
        path += [*replay[i], *tail.ids]
    assert path == list(renderer.root(messages, tools, replay).ids)


@pytest.mark.parametrize("name", CAN)
@FEW
@given(data=st.data())
def test_content_is_never_structure(renderers, name, data):
    renderer = renderers[name]
    wired = data.draw(conversations(name, hostile))
    structural = set(renderer.codec.structural.values())

    def skeleton(change):
        said = [{**m, "content": "x" if m["role"] == "assistant" else change(m["content"])}
                for m in wired]  # fmt: skip
        ids = renderer.root(wire.normalise(said), TOOLS if "c" in CAN[name] else None, {}).ids
        return [i for i in ids if i in structural], renderer.codec.decode(ids)

    dirty, text = skeleton(lambda t: f"q{t}q")
    assert dirty == skeleton(lambda t: "q")[0]
    for m in wired:
        if m["role"] == "user":
            assert f"q{m['content']}q" in text


@pytest.mark.parametrize("name", [n for n in CAN if "c" in CAN[n]])
@FEW
@given(data=st.data())
def test_calls_come_back_as_they_were_written(renderers, name, data):
    renderer = renderers[name]
    wired = data.draw(
        conversations(name, plain).filter(lambda c: any("tool_calls" in m for m in c))
    )
    messages = wire.normalise(wired)
    replies = renderer.sampled([*messages, {"role": "assistant", "content": "z"}], TOOLS)
    for i, ids in replies.items():
        parsed = renderer.parse(ids, False, TOOLS)
        calls = [(c.name, json.loads(c.arguments)) for c in parsed.calls]
        wrote = messages[i].get("calls", ())
        assert calls == [(c["name"], json.loads(c["arguments"])) for c in wrote]
        edges = [0, *(s.end for s in parsed.spans)]
        assert [s.start for s in parsed.spans] == edges[:-1] and edges[-1] == len(ids)


@pytest.mark.parametrize("name", [n for n in CAN if "c" in CAN[n]])
def test_a_call_may_have_no_arguments(renderers, name):
    renderer = renderers[name]
    call = {"name": "edit", "arguments": "{}", "id": "call00000"}
    messages = [{"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "calls": [call]},
                {"role": "tool", "content": "b", "call_id": "call00000"}]  # fmt: skip
    _, said, *_ = renderer.render_messages(messages, TOOLS)
    (read,) = renderer.parse(said.ids, False, TOOLS).calls
    assert (read.name, read.arguments) == ("edit", "{}")


@pytest.mark.parametrize("name", CAN)
def test_a_reply_that_says_nothing_is_what_the_template_writes(renderers, name):
    """Templates ask whether a content is empty (GLM: a newline more); no mark may answer for it."""
    renderer, ask = renderers[name], {"role": "user", "content": "go"}
    for said in ("", " ", "\n"):
        wired = [ask, {"role": "assistant", "content": said}, ask]
        ids = renderer.root(wire.normalise(wired), None, {}).ids
        assert renderer.codec.decode(ids) == renderer._template.render(wired, None, True)


@pytest.mark.parametrize("name", CAN)
def test_a_reply_may_be_white_space(renderers, name):
    user = {"role": "user", "content": "u"}
    talk = [
        user,
        {"role": "assistant", "content": " "},
        user,
        {"role": "assistant", "content": "z"},
    ]
    assert len(renderers[name].render_messages(talk, None)) in (4, 5)


def test_a_stop_token_that_opens_another_turn_is_a_conflict(renderers):
    glm = renderers["glm4moe"]
    user, tool = (glm.codec.structural[t] for t in ("<|user|>", "<|observation|>"))
    said = {"role": "assistant", "content": "x"}
    history = [{"role": "user", "content": "a"}, said]
    body = glm.codec.full.encode("\nx", add_special_tokens=False).ids
    extended = glm.tail([{"role": "user", "content": "b"}], [*body, user], {}, history)
    assert glm.codec.decode(extended.ids) == "\nb<|assistant|>"
    with pytest.raises(Unextendable, match="role_marker_conflict"):
        glm.tail([{"role": "user", "content": "b"}], [*body, tool], {}, history)
    cut = glm.tail([{"role": "user", "content": "b"}], body, {}, history)
    assert cut.ids[0] == user and cut.provenance.startswith("yco")


def test_reasoning_stays_or_goes_as_the_policy_says(family_folders):
    keep = Renderer(family_folders["qwen3"])
    strip = Renderer(family_folders["qwen3"], thinking="template")
    text = "<think>\nhm\n</think>\n\nyes<|im_end|>"
    ids = keep.codec.full.encode(text, add_special_tokens=False).ids
    parsed = keep.parse(ids, False)
    assert (parsed.reasoning, parsed.content) == ("hm", "yes")
    history = [{"role": "user", "content": "a"},
               {"role": "assistant", "content": "yes", "reasoning": "hm"}]  # fmt: skip
    then = [{"role": "user", "content": "b"}]
    assert keep.tail(then, ids, {}, history).ids
    with pytest.raises(Unextendable, match="thinking_retention"):
        strip.tail(then, ids, {}, history)
    assert strip.tail([{"role": "tool", "content": "t"}], ids, {}, history).ids
    messages = [*history, *then]
    assert "hm" in keep.codec.decode(keep.root(messages, None, {1: ids}).ids)
    root = strip.codec.decode(strip.root(messages, None, {1: ids}).ids)
    assert root == strip._template.render([{k: v for k, v in m.items() if k != "reasoning"}
                                           for m in messages], None, True)  # fmt: skip


def test_reasoning_that_was_cut_off_is_closed(renderers):
    qwen = renderers["qwen3_5_think"]
    ids = qwen.codec.full.encode("hm", add_special_tokens=False).ids
    assert qwen.parse(ids, True).reasoning == "hm"
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    tail = qwen.tail([{"role": "user", "content": "b"}], ids, {}, history)
    assert qwen.codec.decode(tail.ids).startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\nb")
    assert set(tail.provenance[: tail.provenance.index("c")]) == {"y"}


def test_mistral_ids_are_in_the_prompt(renderers):
    mistral = renderers["mistral_tekken"]
    text = '[TOOL_CALLS][{"name": "edit", "arguments": {}, "id": "Ab3dEf7h9"}]</s>'
    ids = mistral.codec.full.encode(text, add_special_tokens=False).ids
    assert mistral.parse(ids, False).calls[0].id == "Ab3dEf7h9"
    minted = "call3x0xffffffffff"
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "calls": [
        {"name": "edit", "arguments": "{}", "id": minted}]}]  # fmt: skip
    tail = mistral.tail([{"role": "tool", "content": "ok", "call_id": minted}], ids, {}, history)
    assert mistral.codec.decode(tail.ids) == (
        '[TOOL_RESULTS]{"content": "ok", "call_id": "Ab3dEf7h9"}[/TOOL_RESULTS]'
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "glm4moe"])
def test_reasoning_tags_without_their_pair_are_text(renderers, name):
    """Templates cut content at such tags; where they would cut a reply in two, nothing is cut."""
    renderer = renderers[name]
    tags = {i for t, i in renderer.codec.structural.items() if "think" in t}
    for content in ("</think>", "a</think>b", "x<think>", "</think>a<think>"):
        said = {"role": "assistant", "content": content}
        user = {"role": "user", "content": "u"}
        _, reply, *_ = renderer.render_messages([user, said, user], None)
        body = renderer.codec.decode([i for i in reply.ids if i not in tags])
        assert content in body
        assert content in renderer.codec.decode(renderer.root([user, said, user], None, {}).ids)
    inline = {"role": "assistant", "content": "<think>hm</think>yes"}
    text = renderer.codec.decode(renderer.root([user, inline, user], None, {}).ids)
    assert "yes" in text and "hm" not in text


def test_what_a_template_cannot_write_is_the_agents_mistake(renderers):
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RenderError, match="roles must alternate") as caught:
        renderers["gemma3"].root(two, None, {})
    assert caught.value.status == 400
