"""The decoder against transformers' Qwen3, and its folder format."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from nanoswe_trainer.model import (
    Decoder,
    ModelConfig,
    ModelError,
    initialise,
    load_decoder,
    packed_attention,
    save_decoder,
)


def logits(decoder: Decoder, documents: list[list[int]]) -> torch.Tensor:
    lengths = [len(d) for d in documents]
    ids = torch.tensor([t for d in documents for t in d])
    positions = torch.cat([torch.arange(n) for n in lengths])
    return decoder.head(decoder(ids, positions, packed_attention(lengths)))


@pytest.mark.parametrize("seed", range(6))
def test_logits_equal_transformers_on_random_configs(
    seed: int, tmp_path: Path, randomise: Callable[[Decoder], Decoder]
) -> None:
    rng = random.Random(seed)
    kv = rng.choice([1, 2])
    config = ModelConfig(
        vocab_size=rng.randrange(60, 120), hidden_size=rng.choice([32, 48]),
        intermediate_size=rng.choice([40, 96]),
        num_hidden_layers=rng.randrange(1, 4), num_attention_heads=kv * rng.choice([1, 2, 3]),
        num_key_value_heads=kv,
        head_dim=rng.choice([8, 16]), rope_theta=rng.choice([1e4, 1e6]),
        tie_word_embeddings=bool(seed % 2),
    )  # fmt: skip
    ours = randomise(initialise(config, seed))
    save_decoder(ours, tmp_path)
    theirs = Qwen3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    documents = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in (1, 17, 40)]
    with torch.no_grad():
        mine = logits(ours, documents).split([len(d) for d in documents])
        for document, got in zip(documents, mine, strict=True):
            want = theirs(torch.tensor([document])).logits[0]
            assert (got - want).abs().max() < 1e-5


def test_reads_what_transformers_writes(small: Decoder, tmp_path: Path) -> None:
    save_decoder(small, tmp_path / "a")
    Qwen3ForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = load_decoder(tmp_path / "b")
    assert again.config == small.config
    for name, tensor in small.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_packing_does_not_mix_documents(small: Decoder) -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with torch.no_grad():
        together = logits(small, documents).split([3, 5, 1])
        for document, got in zip(documents, together, strict=True):
            assert torch.allclose(got, logits(small, [document]), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type"),
    ],
)
def test_refuses_what_it_cannot_run(
    small: Decoder, tmp_path: Path, change: dict, says: str
) -> None:
    save_decoder(small, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=says):
        load_decoder(tmp_path)


def test_refuses_missing_and_foreign_weights(small: Decoder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        load_decoder(tmp_path)
    save_decoder(small, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="missing"):
        load_decoder(tmp_path)
