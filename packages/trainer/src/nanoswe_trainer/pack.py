"""Samples in, one Batch of flat tensors out: the only type that holds tensors.

A Row is one token stream with, per token, how much it counts in the loss (`weights`) and, for RL,
its advantage and the logprob it was sampled with. `pack` lays rows one after another; nothing is
padded and nothing is cut. Refuses: an empty row, a first token that is to be trained (nothing
predicts it), arrays of unequal length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ATTENTION_TOKENS = 30_000  # where attention costs what the matrices do; about right for 1-8 B


@dataclass(frozen=True)
class Row:
    """tokens (7, 8, 9), weights (0, .5, .5): 8 and 9 are trained, each with weight one half."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    behaviour: tuple[float, ...] = ()  # logprob when sampled; anything where the weight is 0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.weights) != len(self.tokens):
            raise ValueError(f"a row of {len(self.tokens)} tokens has {len(self.weights)} weights")
        if self.weights[0]:
            raise ValueError("the first token of a row cannot be trained: nothing predicts it")
        for name in ("advantages", "behaviour"):
            if (got := len(getattr(self, name))) not in (0, len(self.tokens)):
                raise ValueError(f"{name} has {got} entries, not {len(self.tokens)}")


@dataclass(frozen=True)
class Batch:
    """T tokens of all rows; N of them are trained, each predicted from the one before it."""

    ids_T: Tensor
    positions_T: Tensor
    lengths: list[int]
    predictors_N: Tensor  # index into T of the token that predicts
    targets_N: Tensor  # the token id predicted
    weights_N: Tensor
    advantages_N: Tensor
    behaviour_N: Tensor
    owners_N: Tensor  # index of the row; a row is whole in its batch
    reference_N: Tensor | None = None  # logprob under the policy that RL began with, or a teacher

    def to(self, device: torch.device) -> "Batch":
        named: dict[str, Any] = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in named.items()})


def pack(rows: Sequence[Row]) -> Batch:
    """Lay rows end to end in the order given."""
    lengths = [len(row.tokens) for row in rows]
    ids = torch.tensor([t for row in rows for t in row.tokens], dtype=torch.long)
    weights = torch.tensor([w for row in rows for w in row.weights], dtype=torch.float32)

    def optional(name: str) -> Tensor:
        values = [v for row in rows for v in (getattr(row, name) or (0.0,) * len(row.tokens))]
        return torch.tensor(values, dtype=torch.float32)

    trained = weights.nonzero()[:, 0]
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    return Batch(
        ids_T=ids,
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        lengths=lengths,
        predictors_N=trained - 1,
        targets_N=ids[trained],
        weights_N=weights[trained],
        advantages_N=optional("advantages")[trained],
        behaviour_N=optional("behaviour")[trained],
        owners_N=owners[trained],
    )


def bins(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Consecutive rows in runs of at most `max_tokens` (a longer single row stands alone)."""
    out: list[list[Row]] = []
    size = max_tokens + 1
    for row in rows:
        if size + len(row.tokens) > max_tokens:
            out.append([])
            size = 0
        out[-1].append(row)
        size += len(row.tokens)
    return out


def spread(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """The rows of each rank, about equal in cost (linear layers plus attention), in their order."""
    costs = [len(row.tokens) * (1 + len(row.tokens) / ATTENTION_TOKENS) for row in rows]
    loads, owner = [0.0] * ranks, [0] * len(rows)
    for i in sorted(range(len(rows)), key=lambda i: -costs[i]):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += costs[i]
    return [[row for row, o in zip(rows, owner, strict=True) if o == rank] for rank in range(ranks)]
