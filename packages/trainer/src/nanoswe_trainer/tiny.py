"""The demo's model from nothing: a seed in; a folder with tokenizer.json, chat_template.jinja,
config.json, weights out.

Why a tokenizer of our own: a model of under a million parameters learns to copy an identifier
within a minute only if the identifier has one id wherever it stands, and has no tokens to spare for
boilerplate. So words of a closed list are whole tokens, anything else falls back to bytes (every
text still encodes), and fixed fragments are single tokens. Fragments that carry turn structure are
marked special: text that an agent observes can never encode to them.
"""

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from nanoswe_harbor import nano
from nanoswe_trainer.model import Decoder, ModelConfig, initialise, save_decoder

CALL_OPEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "'
STRUCTURE = (
    "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_start|>system\n", "<|im_start|>user\n",
    "<|im_start|>assistant\n", CALL_OPEN, '"}}\n</tool_call>', "<tool_call>", "</tool_call>",
    "<tool_response>\n", "\n</tool_response>",
)  # fmt: skip
FRAGMENTS = (
    "You fix one bug. Use bash. Say submit when done.", "(no output)", "cat ", "submit",
    "sed -i '/def ", "/,/return/s|return .*|return ", "|' ", "):\n    return ", "\n\n\n",
    "def ",
)  # fmt: skip
WORD = re.compile(r"[A-Za-z]+")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{ '<|im_start|>user' }}
{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{%- if loop.index0 or message.content -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string -%}
{{ call.function.arguments }}
{%- else -%}
{{ call.function.arguments | tojson }}
{%- endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Bytes, the words that nano tasks are written with, and the fragments above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = (
        *nano.WORDS,
        *nano.SENTENCES,
        *(f"{b.phrase} {b.good}" for b in nano.BUGS),
        "py error exit",
    )
    words = sorted({w for text in texts for w in WORD.findall(text) if len(w) > 1})
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[A-Za-z]+|\s|[^A-Za-z\s]"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in STRUCTURE])
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in FRAGMENTS])
    return tokenizer


def create(folder: Path, seed: int) -> Decoder:
    """Write a complete Hugging Face style model folder with random weights."""
    tokenizer = build_tokenizer()
    config = ModelConfig(vocab_size=-(-tokenizer.get_vocab_size() // 8) * 8)
    decoder = initialise(config, seed)
    save_decoder(decoder, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return decoder
