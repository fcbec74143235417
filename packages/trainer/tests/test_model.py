"""The decoder against transformers' Qwen3, and its folder format."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

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


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "llama3"])
@pytest.mark.parametrize("seed", range(4))
def test_logits_equal_transformers_on_random_configs(
    seed: int, kind: str, tmp_path: Path, randomise: Callable[[Decoder], Decoder]
) -> None:
    rng = random.Random(seed)
    kv = rng.choice([1, 2])
    config = ModelConfig(
        vocab_size=rng.randrange(60, 120), hidden_size=rng.choice([48, 96]),
        intermediate_size=rng.choice([40, 96]),
        num_hidden_layers=rng.randrange(1, 4), num_attention_heads=kv * rng.choice([1, 2, 3]),
        num_key_value_heads=kv,
        head_dim=rng.choice([8, 16]), rope_theta=rng.choice([1e4, 1e6]),
        tie_word_embeddings=bool(seed % 2), model_type="llama" if kind == "llama3" else kind,
        rope_scaling=SCALED if kind == "llama3" else None,
    )  # fmt: skip
    ours = randomise(initialise(config, seed))
    for name, parameter in ours.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_decoder(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    documents = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in (1, 17, 40)]
    with torch.no_grad():
        mine = logits(ours, documents).split([len(d) for d in documents])
        for document, got in zip(documents, mine, strict=True):
            want = theirs(torch.tensor([document])).logits[0]
            assert (got - want).abs().max() < 1e-5
    again = load_decoder(tmp_path)
    assert again.config == config


def test_reads_what_transformers_writes(small: Decoder, tmp_path: Path) -> None:
    save_decoder(small, tmp_path / "a")
    Qwen3ForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = load_decoder(tmp_path / "b")
    assert again.config == small.config
    for name, tensor in small.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_reads_a_llama_in_several_files_as_transformers_writes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rope_parameters=SCALED | {"rope_theta": 1e4},
        tie_word_embeddings=False,
    ))  # fmt: skip
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, document = load_decoder(tmp_path), list(range(60))
    with torch.no_grad():
        want = theirs(torch.tensor([document])).logits[0]
        assert (logits(ours, [document]) - want).abs().max() < 1e-5


def test_packing_does_not_mix_documents(small: Decoder) -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    with torch.no_grad():
        together = logits(small, documents).split([3, 5, 1])
        for document, got in zip(documents, together, strict=True):
            assert torch.allclose(got, logits(small, [document]), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
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
