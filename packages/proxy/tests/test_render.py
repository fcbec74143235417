"""Rendering: no structural id from content, canonical ids, SFT mask, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nanoswe_proxy import wire
from nanoswe_proxy.errors import RenderError
from nanoswe_proxy.parse import Reader
from nanoswe_proxy.render import syntax
from nanoswe_proxy.render.base import Renderer

OURS = (Path(__file__).parents[1] / "src/nanoswe_proxy/render/chatml.jinja").read_text()
NASTY = [
    "<|im_end|>", "<|im_start|>", "<|im_start|>assistant\n", "<tool_call>", "</tool_call>", "\n",
    "<", "</tool_response>", '"}}\n</tool_call>', "<think>", "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3",
    "a", '<tool_call>\n{"name": "bash", "arguments": {"command": "', "é", "🦊",
    "<|endoftext|>", " ",
]  # fmt: skip
text = st.lists(st.sampled_from(NASTY) | st.text(max_size=5), max_size=8).map("".join)
# what a canonical tokenizer cannot confuse with structure, on any tokenizer of these tests
plain = st.text("ab left+é", min_size=1, max_size=12).map(lambda s: f"x{s}x")


def call(command: str) -> dict:
    arguments = json.dumps({"command": command}, ensure_ascii=False)
    return {"id": "1", "type": "function", "function": {"name": "bash", "arguments": arguments}}


def turn(content: str, commands: list[str]) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": [call(c) for c in commands]}


@given(observed=text, typed=text)
def test_content_never_becomes_structure(renderer, observed, typed):
    def render(user, tool):
        wired = [
            {"role": "system", "content": user},
            {"role": "user", "content": user},
            turn("ok", ["x"]),
            {"role": "tool", "content": tool},
            {"role": "tool", "content": tool},
        ]
        return renderer.root(wire.normalise(wired), [{"name": "t", "about": user}], {})

    codec = renderer.codec
    structural = set(codec.structural.values())
    dirty, clean = render(typed, observed), render("", "")
    assert [i for i in dirty.ids if i in structural] == [i for i in clean.ids if i in structural]
    assert len(dirty.ids) == len(dirty.provenance)
    written = codec.decode(dirty.ids)
    assert f"user\n{typed}<|im_end|>\n<|im_start|>assistant\nok" in written
    assert written.count(f"<tool_response>\n{observed}\n</tool_response>") >= 2


@given(command=text)
def test_arguments_never_become_structure(renderer, command):
    rendered = renderer.render_messages(wire.normalise([turn("", [command])]), None)
    parsed = renderer.parse(rendered[-1].ids, truncated=False)
    end = renderer.codec.structural["<|im_end|>"]
    assert rendered[-1].ids.count(end) == 1 and rendered[-1].ids[-1] == end
    if not any(tag in command for tag in ("tool_call>",)):  # a text parser cannot tell these apart
        assert json.loads(parsed.calls[0].arguments) == {"command": command}


messages = st.lists(
    st.one_of(
        plain.map(lambda t: [{"role": "user", "content": t}]),
        st.tuples(plain, plain).map(lambda p: [turn(p[0], []), {"role": "user", "content": p[1]}]),
        st.tuples(plain, plain, plain).map(
            lambda p: [turn("", [p[0], p[1]]), *({"role": "tool", "content": t} for t in p[1:])]
        ),
    ),
    min_size=1,
    max_size=4,
).map(lambda parts: [{"role": "user", "content": "go"}, *(m for p in parts for m in p)])


@given(wired=messages, system=st.none() | plain)
def test_ids_equal_the_canonical_ones(renderer, folder, wired, system):
    """The template's text through the plain tokenizer gives the same ids as rendering by parts."""
    if system:
        wired = [{"role": "system", "content": system}, *wired]
    canonical = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for m in wired:
        for c in m.get("tool_calls", ()):
            c["function"]["arguments"] = json.loads(c["function"]["arguments"])
    template = renderer._template.render(wired, None, True)
    expected = canonical.encode(template, add_special_tokens=False).ids
    assert list(renderer.root(wire.normalise(wired), None, {}).ids) == expected


def test_tools_stand_in_the_preamble(folders):
    renderer = Renderer(folders["bpe"])
    tools = [{"type": "function", "function": {"name": "bash", "description": "say <|im_end|>"}}]
    ids, provenance = renderer.root([{"role": "user", "content": "hi"}], tools, {})
    written = renderer.codec.decode(ids)
    assert json.dumps(tools[0]) in written
    assert ids.count(renderer.end_id) == 2 and len(ids) == len(provenance)


def test_call_renders_byte_exactly(renderer):
    wired = [turn("", ["cat stock.py"])]
    assert renderer.codec.decode(renderer.render_messages(wire.normalise(wired), None)[-1].ids) == (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat stock.py"}}\n</tool_call>'
        "<|im_end|>"
    )


def test_call_scaffold_is_one_token(folders):
    renderer = Renderer(folders["words"])
    body = renderer.render_messages(wire.normalise([turn("", ["cat stock"])]), None)[-1]
    spelled = [renderer.codec.decode([i]) for i in body.ids]
    opening = '<tool_call>\n{"name": "bash", "arguments": {"command": "'
    assert spelled == [opening, "cat ", "stock", '"}}\n</tool_call>', "<|im_end|>"]


def test_provenance_letters(folders):
    renderer = Renderer(folders["words"])
    encoded = renderer.tail([{"role": "tool", "content": "left right"}], (5,), {})
    spelled = [renderer.codec.decode([i]) for i in encoded.ids]
    assert spelled == [
        "<|im_end|>", "\n", "<|im_start|>user\n", "<tool_response>\n", "left", " ", "right",
        "\n</tool_response>", "<|im_end|>", "\n", "<|im_start|>assistant\n",
    ]  # fmt: skip
    assert encoded.provenance == "ycccooocccc"


REFUSED = {
    "{% for m in messages %}[{{ m.content }}]{% endfor %}": "no special token",
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}": "where a reply begins",
    "{% if %}": "no Jinja",
    "{{ messages[7].content.x }}": "the chat template refused",
    OURS.replace('"name": "\' + c', '"name": "x\' + c'): "no known syntax",
    OURS.replace(
        "m.role + '\\n'", "m.role + '\\n' + (messages | length | string)"
    ): "every history",
    OURS.replace('"arguments": \'', '"arguments": [\'').replace("'}", "']}"): "but was written as",
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_cannot_be_served_exactly_is_refused(folders, tmp_path, template):
    shutil.copy(folders["bpe"] / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RenderError, match=REFUSED[template]):
        Renderer(tmp_path)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(RenderError, match=r"tokenizer\.json is missing"):
        Renderer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(RenderError, match=r"tokenizer\.json is no tokenizer"):
        Renderer(tmp_path)


@pytest.mark.parametrize(
    ("said", "status", "content", "names"),
    [
        ("hello ", "text", "hello ", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "calls", "", ["f"]),
        ('so:\n<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "calls", "so:", ["f"]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ', "malformed", None, []),
        ('<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', "malformed", None, []),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "malformed", None, []),
        ("<tool_call>[]</tool_call>", "malformed", None, []),
        ("</tool_call>", "malformed", None, []),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>',
            "malformed", "<tool_call>", ["f"],
        ),
        (
            'a\n\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>\nb\n',
            "calls", "a\nb\n", ["f"],
        ),
        ('\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', "calls", "", ["f"]),
        ("so:\n\n<tool_call>[]", "malformed", None, []),
        ("\n\ufdd2\ufdd3a\n", "text", None, []),
    ],
)  # fmt: skip
def test_parse(folders, said, status, content, names):
    renderer = Renderer(folders["bpe"])
    ids = renderer.codec.full.encode(said, add_special_tokens=False).ids
    parsed = renderer.parse([*ids, renderer.end_id], truncated=False)
    assert (parsed.status, [c.name for c in parsed.calls]) == (status, names)
    assert parsed.content == (said if content is None else content)


PIECES = [*NASTY, "</think>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "\n\n"]


@pytest.fixture(scope="module")
def bpe(folders):
    return Renderer(folders["bpe"])


def fold(renderer, grammar, ids, truncated):
    reader = Reader(renderer.codec, grammar, renderer.stop_ids)
    reader.feed(ids)
    reader.end(truncated)
    return reader.parsed


replies = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8)


@st.composite
def generations(draw, renderer):
    """Replies in canonical ids or in pieces, with noise, cut off or not."""
    codec, ids = renderer.codec, []
    for piece in draw(replies):
        encode = draw(st.sampled_from([codec.full, codec._content])).encode
        ids += encode(piece, add_special_tokens=False).ids
    noise = draw(st.lists(st.integers(0, codec.full.get_vocab_size() + 2), max_size=3))
    at = draw(st.integers(0, len(ids)))
    ids = [i for i in [*ids[:at], *noise, *ids[at:]] if i not in renderer.stop_ids]
    truncated = draw(st.booleans())
    return (ids if truncated else [*ids, renderer.end_id]), truncated


ONE = f'<tool_call>\n{{"name": "{syntax.NAME}", "arguments": {{"key": "value"}}}}\n</tool_call>'
HERMES = syntax.learn(ONE)
GRAMMARS = {
    "plain": HERMES,
    "think": replace(HERMES, think=("<think>", "</think>")),
    "thinking": replace(HERMES, think=("<think>", "</think>"), thinking=True),
}


@pytest.mark.parametrize("grammar", GRAMMARS)
@given(data=st.data())
def test_a_stream_is_the_reply_however_it_is_cut(bpe, grammar, data):
    renderer = bpe
    ids, truncated = data.draw(generations(renderer))
    reader = Reader(renderer.codec, GRAMMARS[grammar], renderer.stop_ids)
    whole = fold(renderer, GRAMMARS[grammar], ids, truncated)
    deltas, rest = [], ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        deltas += reader.feed(rest[:size])
        rest = rest[size:]
    deltas += reader.end(truncated)
    assert reader.parsed == whole
    streamed = {k: "".join(d.text for d in deltas if d.kind == k) for k in ("content", "reasoning")}
    assert streamed == {"content": whole.content, "reasoning": whole.reasoning}
    assert [d.text for d in deltas if d.kind == "call_name"] == [c.name for c in whole.calls]
    assert [d.text for d in deltas if d.kind == "call_args"] == [c.arguments for c in whole.calls]
    assert [d.index for d in deltas if d.kind == "call_args"] == [*range(len(whole.calls))]
    # invariant 8: in order, disjoint, covering; each part's ids spell its text
    edges = [0, *(s.end for s in whole.spans)]
    assert [s.start for s in whole.spans] == edges[:-1] and edges[-1] == len(ids)
    if grammar == "plain" and not whole.calls:
        body = renderer.codec.decode(ids if truncated else ids[:-1])
        # cut in the middle of a character: its first bytes are held back, bytes of none are not
        end = "\ufffd" if truncated else ""
        assert whole.content.rstrip(end or None) == body.rstrip(end or None)
        assert truncated or whole.content == body


def test_spans_tell_the_parts(folders):
    renderer = Renderer(folders["bpe"])
    said = '<think>\nhm\n</think>\n\nso\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = [*renderer.codec.full.encode(said, add_special_tokens=False).ids, renderer.end_id]
    parsed = fold(renderer, GRAMMARS["think"], ids, False)
    assert (parsed.reasoning, parsed.content, parsed.status) == ("hm", "so", "calls")
    spelled = [(s.kind, renderer.codec.decode(ids[s.start : s.end])) for s in parsed.spans]
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert spelled == [
        ("reasoning", "<think>\nhm\n</think>"), ("content", "\n\nso\n"), ("call", call),
        ("end", "<|im_end|>"),
    ]  # fmt: skip


def test_a_tag_spelled_in_pieces_is_text(folders):
    renderer = Renderer(folders["bpe"])
    said = 'x<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>y'
    ids = renderer.codec._content.encode(said, add_special_tokens=False).ids
    parsed = renderer.parse([*ids, renderer.end_id], truncated=False)
    assert (parsed.content, parsed.status) == (said, "text")


def test_a_character_waits_for_its_last_id(folders):
    renderer = Renderer(folders["bpe"])
    fox = renderer.codec.full.encode("🦊", add_special_tokens=False).ids
    assert len(fox) == 4
    reader = renderer.reader()
    assert [[d.text for d in reader.feed([i])] for i in fox] == [[], [], [], ["🦊"]]
    assert renderer.parse(fox[:3], truncated=True).content == ""
    assert renderer.parse([*fox[:3], renderer.end_id], truncated=False).content == "\ufffd"
    with pytest.raises(RenderError, match="after its stop"):
        reader.feed([renderer.end_id, 5])
