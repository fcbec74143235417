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
    rope_scaling: dict | None = (
        None  # Llama 3's: factor, low_ and high_freq_factor, original length
    )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope(positions_T: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of shape (T, 1, head_dim), fp32."""
    powers = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
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
    return x_THD * cos.to(x_THD.dtype) + torch.cat((-right, left), -1) * sin.to(x_THD.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, kv_width = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        _, normed, biased = KINDS[config.model_type]
        self.q_proj = nn.Linear(config.hidden_size, width, bias=biased)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=biased)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=biased)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
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
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """hidden = decoder(ids_T, positions_T, attend); logits = decoder.head(hidden[rows])."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x = self.model.embed_tokens(ids_T)
        cos, sin = rope(positions_T, self.config)
        for block in self.model.layers:
            x = block(x, cos, sin, attend)
        return self.model.norm(x)

    def head(self, hidden_RD: Tensor) -> Tensor:
        return self.lm_head(hidden_RD)

    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with (the head once, tied or not)."""
        body = sum(p.numel() for n, p in self.named_parameters() if p.ndim == 2 and "layers" in n)
        return body + self.lm_head.weight.numel()


def packed_attention(lengths: list[int]) -> Attend:
    """Causal attention inside each of the documents that lie one after another in T.

    Documents are gathered to (documents, longest) for one SDPA call: under a causal mask the
    padding at the end is never looked at, and linear layers still see packed rows only.
    """
    longest = max(lengths)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    offsets = torch.arange(longest)
    inside = offsets[None] < torch.tensor(lengths)[:, None]
    gather = torch.where(inside, starts[:, None] + offsets, 0).flatten()
    scatter = inside.flatten().nonzero()[:, 0]

    def padded(x: Tensor) -> Tensor:
        rows = x.index_select(0, gather).view(len(lengths), longest, *x.shape[1:])
        return rows.transpose(1, 2)

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            padded(q), padded(k), padded(v), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, scatter)

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


def _read_config(file: Path) -> dict:
    """config.json with RoPE's settings in one place, whichever transformers wrote it."""
    raw = json.loads(file.read_text())
    kind = raw.get("model_type")
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
    return raw | {
        "head_dim": head_dim, "num_key_value_heads": heads,
        "rope_theta": raw.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "rope_scaling": rope if rope_type == "llama3" else None,
    }  # fmt: skip


def load_decoder(folder: Path) -> Decoder:
    """Read config.json and the weights, in one file or several, as transformers writes them."""
    try:
        raw = _read_config(folder / "config.json")
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"]:
            tensors |= load_file(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ModelError):
            raise
        needs = "it needs config.json and model.safetensors"
        raise ModelError(f"{folder}: cannot read the model ({error}); {needs}") from error
    known = ModelConfig.__dataclass_fields__
    decoder = Decoder(ModelConfig(**{k: v for k, v in raw.items() if k in known}))
    missing, unexpected = decoder.load_state_dict(tensors, strict=False)
    missing = [
        m for m in missing if not (m == "lm_head.weight" and decoder.config.tie_word_embeddings)
    ]
    if missing or unexpected:
        raise ModelError(
            f"{folder}/model.safetensors: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    return decoder


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write what `load_decoder`, transformers and vLLM read."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = decoder.config.model_type
    config = asdict(decoder.config) | {
        "architectures": [KINDS[kind][0]], "hidden_act": "silu",
        "attention_bias": False, "torch_dtype": "float32", "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {k: v.detach().contiguous() for k, v in decoder.state_dict().items()}
    if decoder.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
