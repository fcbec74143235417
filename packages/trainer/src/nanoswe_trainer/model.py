"""A Qwen3, Qwen2 or Llama decoder in plain torch, weights named as Hugging Face names them.

In: a folder with config.json and *.safetensors (or a ModelConfig for random weights), then flat
token ids. Out: hidden states; `Decoder.head` turns chosen rows into logits. Attention is a
callable, so that the packed trainer and the KV-cached engine run the very same layers. Refuses:
other architectures, sliding windows, RoPE scaled but as Llama 3 does, other biases: each by name.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

# attend(layer, q_THD, k_TKD, v_TKD) -> out_THD, over whatever past or documents the caller keeps
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# model_type -> (class in transformers, queries and keys are normed, their projections are biased)
KINDS = {
    "qwen3": ("Qwen3ForCausalLM", True, False),
    "qwen2": ("Qwen2ForCausalLM", False, True),
    "llama": ("LlamaForCausalLM", False, False),
}


class ModelError(ValueError):
    """The folder does not hold a model that this file can run."""


@dataclass(frozen=True)
class ModelConfig:
    """The fields of a config.json that decide the computation."""

    vocab_size: int
    model_type: str = "qwen3"
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 1024
    rope_scaling: dict | None = None  # Llama 3's: factor, low_ and high_freq_factor, …


def rope(positions_T: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of shape (T, 1, head_dim), fp32."""
    device = positions_T.device
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    powers = powers / config.head_dim
    frequencies = 1.0 / config.rope_theta**powers
    if scaling := config.rope_scaling:
        # long waves are stretched by `factor`, short ones stay, and between them it is a blend
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])
    angles = positions_T.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_THD.chunk(2, -1)
    cos, sin = cos.to(x_THD.dtype), sin.to(x_THD.dtype)
    return torch.addcmul(x_THD * cos, torch.cat((-right, left), -1), sin)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        _, normed, biased = KINDS[config.model_type]
        self.q_proj = nn.Linear(config.hidden_size, width, bias=biased)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=biased)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=biased)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = rotate(self.q_norm(self.q_proj(x).view(len(x), -1, self.head_dim)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(len(x), -1, self.head_dim)), cos, sin)
        v = self.v_proj(x).view(len(x), -1, self.head_dim)
        return self.o_proj(attend(self.layer, q, k, v).reshape(len(x), -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """hidden = decoder(ids_T, positions_T, attend); logits = decoder.head(hidden[rows]).

    With `recompute`, the backward pass computes each block again instead of keeping its insides.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.recompute = config, False
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x = self.model.embed_tokens(ids_T)
        cos, sin = rope(positions_T, self.config)
        for block in self.model.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        return self.model.norm(x)

    def head(self, hidden_RD: Tensor) -> Tensor:
        return self.lm_head(hidden_RD)


def packed_attention(lengths: list[int], device: str = "cpu") -> Attend:
    """Causal attention inside each of the documents that lie one after another in T.

    On a GPU torch's variable-length kernel, in bf16; on a CPU a call for each document.
    """
    if device == "cuda":
        longest = max(lengths)
        ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)

        def varlen(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = varlen_attn(
                q.bfloat16(), k.bfloat16(), v.bfloat16(), ends, ends, longest, longest,
                window_size=(-1, 0), enable_gqa=True,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out.to(v.dtype)

        return varlen

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = (x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v))
        out = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            for q, k, v in zip(*split, strict=True)
        ]
        return torch.cat(out, 2)[0].transpose(0, 1)

    return attend


def initialise(config: ModelConfig, seed: int) -> Decoder:
    """Random weights, a function of the seed alone.

    Each block starts as the identity (what it adds to the stream is zero), so that the first steps
    see the tokens and not the noise of four random layers: copying forms three times sooner.
    """
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 2:
            std = 0.1 if "embed" in name else config.hidden_size**-0.5
            nn.init.normal_(parameter, std=std, generator=generator)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
    return decoder


def read_config(folder: Path) -> ModelConfig:
    """config.json with RoPE's settings in one place, whichever transformers wrote it."""
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text())
        kind = raw.get("model_type")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{file}: not a model's configuration ({error})") from error
    if kind not in KINDS:
        raise ModelError(f"{file}: model_type {kind!r} is not supported, only {', '.join(KINDS)}")
    fine = {"use_sliding_window": (False,), "attention_bias": (False, None), "mlp_bias": (False,),
            "hidden_act": ("silu",)}  # fmt: skip
    for key, values in fine.items():
        if raw.get(key, values[0]) not in values:
            raise ModelError(f"{file}: {key} = {raw[key]!r} is not supported, only {values[0]!r}")
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ModelError(f"{file}: rope type {rope_type!r} is not supported")
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    heads = raw.get("num_key_value_heads") or raw["num_attention_heads"]
    known = {k: v for k, v in raw.items() if k in ModelConfig.__dataclass_fields__}
    return ModelConfig(**known | {
        "head_dim": head_dim, "num_key_value_heads": heads,
        "rope_theta": raw.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "rope_scaling": rope if rope_type == "llama3" else None,
    })  # fmt: skip


def load_decoder(folder: Path) -> Decoder:
    """Read config.json and the weights, in one file or several, as transformers writes them."""
    try:
        config = read_config(folder)
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
            tensors |= load_file(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ModelError):
            raise
        needs = "it needs config.json and model.safetensors"
        raise ModelError(f"{folder}: cannot read the model ({error}); {needs}") from error
    with torch.device("meta"):  # nothing is drawn at random to be thrown away
        decoder = Decoder(config)
    tensors = {k: v.float() for k, v in tensors.items()}
    missing, unexpected = decoder.load_state_dict(tensors, strict=False, assign=True)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        text = f"missing {missing[:3]}, unexpected {unexpected[:3]}"
        raise ModelError(f"{folder}/model.safetensors: {text}")
    return decoder


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write what `load_decoder`, transformers and vLLM read."""
    save_weights(decoder.config, decoder.state_dict(), folder)


def save_weights(
    made: ModelConfig, state: dict[str, Tensor], folder: Path, half: bool = False
) -> None:
    """With `half` in bf16, as servers hold them."""
    dtype = torch.bfloat16 if half else torch.float32
    folder.mkdir(parents=True, exist_ok=True)
    kind = made.model_type
    config = asdict(made) | {
        "architectures": [KINDS[kind][0]], "hidden_act": "silu",
        "attention_bias": False, "torch_dtype": str(dtype)[6:], "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in state.items()}
    if made.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
