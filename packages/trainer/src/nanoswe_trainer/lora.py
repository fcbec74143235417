"""LoRA (2106.09685): a Decoder in; the same, frozen, with a low-rank addition to every matrix of
its blocks that alone learns, out.

The additions start at zero, so nothing changes before the first step. alpha is twice the rank. What
is exported is merged: W + 2 B A.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoswe_trainer.model import Decoder

SCALE = 2.0


class LoraLinear(nn.Linear):
    """W x + 2 B A x."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        a = torch.randn(rank, base.in_features, generator=generator) * base.in_features**-0.5
        self.lora_a = nn.Parameter(a)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SCALE * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_lora(decoder: Decoder, rank: int, seed: int) -> None:
    """The same additions on every rank: they are a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    decoder.requires_grad_(False)
    for module in list(decoder.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, generator))


def merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as if there had never been a LoRA."""
    out = {k: v for k, v in tensors.items() if not k.endswith((".lora_a", ".lora_b"))}
    for name in (k.removesuffix(".lora_a") for k in tensors if k.endswith(".lora_a")):
        addition = tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]
        out[f"{name}.weight"] = tensors[f"{name}.weight"] + SCALE * addition
    return out
