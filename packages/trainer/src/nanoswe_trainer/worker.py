"""The policy and its optimizer: rows in, one optimizer step and its numbers out.

Every normalisation is in the rows' weights already (see `algo`), so a step only sums: splitting
rows into more or fewer micro-batches changes nothing but rounding. A gradient that is not finite
skips the step and is counted; three in a row stop the run.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.model import Decoder
from nanoswe_trainer.muon import Muon
from nanoswe_trainer.pack import Batch, Row, bins, pack

# loss(logprobs_N, batch) -> (scalar to minimise, metrics that add up over micro-batches, or _max)
Loss = Callable[[Tensor, Batch], tuple[Tensor, dict[str, float]]]


class DivergedError(RuntimeError):
    """Three steps in a row had a gradient that is not finite."""


def nll(logprobs_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The SFT loss: minus the weighted sum of logprobs."""
    loss = -(batch.weights_N * logprobs_N).sum()
    return loss, {"loss": loss.item()}


class Worker:
    """A Decoder and its optimizers: Muon for the blocks' matrices, if asked, AdamW for the rest."""

    def __init__(self, decoder: Decoder, *, learning_rate: float, muon_learning_rate: float = 0.0,
                 clip_norm: float = 1.0, max_tokens: int = 16384, bf16: bool = False,
                 reference: Decoder | None = None):  # fmt: skip
        self.decoder, self.clip_norm, self.reference = decoder, clip_norm, reference
        self.max_tokens, self.bf16 = max_tokens, bf16
        matrices = [p for n, p in decoder.named_parameters() if p.ndim == 2 and ".layers." in n]
        chosen = {id(p) for p in matrices} if muon_learning_rate else set()
        rest = [p for p in decoder.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        ]
        if muon_learning_rate:
            self.optimizers.append(Muon(matrices, muon_learning_rate))
        self.base_rates = [o.param_groups[0]["lr"] for o in self.optimizers]
        self.skipped = 0

    def step(
        self, rows: Sequence[Row], loss: Loss, *, rate: float = 1.0, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step over all rows at `rate` times the base learning rates."""
        totals: dict[str, float] = {}
        entropy, trained = 0.0, 0
        for part in bins(rows, self.max_tokens):
            batch = pack(part)
            if not len(batch.targets_N):
                continue
            logprobs, entropies = token_logprobs(
                self.decoder, batch, temperature=temperature, bf16=self.bf16
            )
            if self.reference:
                with torch.no_grad():
                    kept, _ = token_logprobs(
                        self.reference, batch, temperature=temperature, bf16=self.bf16
                    )
                batch = replace(batch, reference_N=kept)
            value, numbers = loss(logprobs, batch)
            value.backward()
            for key, number in numbers.items():
                merge = max if key.endswith("_max") else operator.add
                totals[key] = merge(totals.get(key, 0.0), number)
            entropy, trained = entropy + entropies.sum().item(), trained + len(entropies)
        norm = nn.utils.clip_grad_norm_(self.decoder.parameters(), self.clip_norm)
        self._apply(norm, rate)
        return totals | {"grad_norm": norm.item(), "entropy": entropy / max(trained, 1),
                         "trained_tokens": trained, "skipped_updates": self.skipped}  # fmt: skip

    def _apply(self, norm: Tensor, rate: float) -> None:
        finite = bool(torch.isfinite(norm))
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped == 3:
            raise DivergedError(
                "the gradient was not finite three steps in a row: lower the learning rate"
            )
        for optimizer, base in zip(self.optimizers, self.base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = base * rate
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs."""
        optimizers = [o.state_dict() for o in self.optimizers]
        model = self.decoder.state_dict()
        return {"model": model, "optimizers": optimizers, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        self.decoder.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.skipped = state["skipped"]
