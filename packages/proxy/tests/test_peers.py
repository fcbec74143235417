"""Against the reference: transformers' `apply_chat_template` over Qwen's vocabulary."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
from families import CAN, TOOLS, conversations, folder
from hypothesis import given
from hypothesis import strategies as st
from test_families import plain
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanoswe_proxy import wire
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.render.codec import _ALPHABET

pytestmark = pytest.mark.interop
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen's tokenizer.json, from the ranks that dashscope ships."""
    import dashscope

    text = (Path(dashscope.__file__).parent / "resources/qwen.tiktoken").read_bytes()
    ranks = {base64.b64decode(a): int(b) for a, b in (x.split() for x in text.splitlines() if x)}
    letters = {b: c for c, b in _ALPHABET.items()}
    merges = sorted((rank, *_halves(token, ranks)) for token, rank in ranks.items() if token[1:])
    spelled = {t: "".join(letters[b] for b in t) for t in ranks}
    tokenizer = Tokenizer(models.BPE(
        vocab={spelled[t]: i for t, i in ranks.items()},
        merges=[(spelled[a], spelled[b]) for _, a, b in merges],
    ))  # fmt: skip
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("qwen") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that byte-pair merges make this one of."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        order = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        at = order.index(min(order))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@pytest.fixture(scope="session")
def pairs(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("peers")
    made = {}
    for name in CAN:
        path = folder(name, Tokenizer.from_file(str(vocabulary)), root / name)
        made[name] = (Renderer(path), PreTrainedTokenizerFast.from_pretrained(str(path)))
    return made


@pytest.mark.parametrize("name", CAN)
@pytest.mark.parametrize("said", ["", " ", "\n"])
def test_a_reply_that_says_nothing(pairs, name, said):
    """Templates ask whether a content is empty: a mark of ours must not answer for it."""
    renderer, theirs = pairs[name]
    ask = {"role": "user", "content": "go"}
    wired = [ask, {"role": "assistant", "content": said}, ask]
    expected = theirs.apply_chat_template(
        wired, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert list(renderer.root(wire.normalise(wired), None, {}).ids) == list(expected)


@pytest.mark.parametrize("name", CAN)
@given(data=st.data())
def test_ids_are_those_of_transformers(pairs, name, data):
    renderer, theirs = pairs[name]
    wired = data.draw(conversations(name, plain | st.just("")))
    tools = data.draw(st.sampled_from([None, TOOLS]))
    expected = theirs.apply_chat_template(
        wired, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    given_ = json.loads(json.dumps(wired))
    assert list(renderer.root(wire.normalise(given_), tools, {}).ids) == list(expected)
