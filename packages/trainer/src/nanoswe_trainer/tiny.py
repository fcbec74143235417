"""The demo's model from nothing: a seed in; a folder with tokenizer.json, chat_template.jinja,
config.json, weights out.

Why a tokenizer of our own: a model of under a million parameters learns to copy an identifier
within a minute only if the identifier has one id wherever it stands, and has no tokens to spare for
boilerplate. So words of a closed list are whole tokens, anything else falls back to bytes (every
text still encodes), and fixed fragments are single tokens. Fragments that carry turn structure are
marked special: text that an agent observes can never encode to them.
"""

import re
import shutil
from pathlib import Path

import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from nanoswe_harbor import nano
from nanoswe_trainer.model import Decoder, ModelConfig, initialise, save_decoder

WORD = re.compile(r"[A-Za-z]+")

TEMPLATE = Path(__file__).with_name("tiny.jinja")


def build_tokenizer() -> Tokenizer:
    """Bytes, the words that nano tasks are written with, and the fragments above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bugs = (f"{b.phrase} {b.good}" for b in nano.BUGS)
    texts = (*nano.WORDS, *nano.SENTENCES, *bugs, "py error exit")
    words = sorted({w for text in texts for w in WORD.findall(text) if len(w) > 1})
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[A-Za-z]+|\s|[^A-Za-z\s]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    whole = yaml.safe_load(TEMPLATE.with_suffix(".yaml").read_text())
    special = [AddedToken(s, special=True, normalized=False) for s in whole["structure"]]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in whole["fragments"]])
    return tokenizer


def create(folder: Path, seed: int) -> Decoder:
    """Write a complete Hugging Face style model folder with random weights."""
    tokenizer = build_tokenizer()
    config = ModelConfig(vocab_size=-(-tokenizer.get_vocab_size() // 8) * 8)
    decoder = initialise(config, seed)
    save_decoder(decoder, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return decoder
