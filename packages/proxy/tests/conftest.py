"""Two small model folders made here: `bpe` (byte-level BPE, Qwen-like) and `words` (word-level,
scaffold fragments).
"""

from importlib.util import find_spec
from pathlib import Path
from shutil import which

import families
import pytest
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanoswe_proxy.render.base import Renderer

# These run in environments of their own: `nox --session vllm clients openhands templates`.
NEEDS = {"vllm": "vllm", "clients": "minisweagent", "openhands": "openhands", "peers": "dashscope"}
collect_ignore = [f"test_{name}.py" for name, module in NEEDS.items() if find_spec(module) is None]
collect_ignore += [] if which("claude") and which("codex") else ["test_coders.py"]

settings.register_profile(  # a loaded machine is no fault of the code
    "tests", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

TEMPLATE = Path(__file__).with_name("template.jinja")
TEXT = ["the quick brown fox left + right", "return left - right\n\n\ndef scan(width):\n    return"]
CALL_OPEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "'
STRUCTURE = [
    "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_start|>system\n", "<|im_start|>user\n",
    "<|im_start|>assistant\n", CALL_OPEN, '"}}\n</tool_call>', "<tool_call>", "</tool_call>",
    "<tool_response>\n", "\n</tool_response>",
]  # fmt: skip


def _bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 5, trainer)
    # As in Qwen2.5: tool calls are added tokens with special=false, tool responses none at all.
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    return tokenizer


def _words() -> Tokenizer:
    words = ["cat", "stock", "left", "right", "return", "sum", "of", "must", "bash", "command"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[A-Za-z]+|\s|[^A-Za-z\s]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in STRUCTURE])
    fragments = ["(no output)", "cat ", "submit", "\n\n\n", "def "]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in fragments])
    return tokenizer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name. `words` has the template of this folder, `bpe` falls back to ours."""
    made = {}
    for name, tokenizer in (("bpe", _bpe()), ("words", _words())):
        made[name] = tmp_path_factory.mktemp(name)
        tokenizer.save(str(made[name] / "tokenizer.json"))
    (made["words"] / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return made


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders of every family, by the name of its template."""
    root = tmp_path_factory.mktemp("families")
    return {name: families.folder(name, _bpe(), root / name) for name in families.CAN}


class Renderers(dict):
    """Renderers by name, each made when it is first wanted."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def __missing__(self, name: str) -> Renderer:
        self[name] = Renderer(self.folders[name])
        return self[name]


@pytest.fixture(scope="session")
def renderers(folders: dict[str, Path], family_folders: dict[str, Path]) -> Renderers:
    return Renderers(folders | family_folders)


@pytest.fixture(scope="session", params=["bpe", "words"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="session")
def renderer(folder: Path, renderers: Renderers) -> Renderer:
    return renderers[folder.name.rstrip("0123456789")]
