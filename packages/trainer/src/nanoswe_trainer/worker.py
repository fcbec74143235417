"""The policy and its optimizer on one rank: rows in, one optimizer step and its numbers out.

Every normalisation is in the rows' weights already (see `algo`), so a step only sums: splitting
rows into other micro-batches, or over more ranks, changes nothing but rounding. Every rank is given
all rows and takes its own; several shard the weights (FSDP2), and each method is called on all.
A gradient that is not finite skips the step; three in a row stop the run. Refuses Muon on sharded
weights: it needs whole matrices.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from nanoswe_trainer import checkpoint
from nanoswe_trainer.logprob import token_logprobs
from nanoswe_trainer.lora import add_lora, merged
from nanoswe_trainer.model import Decoder, load_decoder, save_weights
from nanoswe_trainer.muon import Muon
from nanoswe_trainer.pack import Batch, Row, bins, pack, spread
from nanoswe_trainer.recipe import TrainRecipe

# loss(logprobs_N, batch) -> (scalar to minimise, metrics that add up over micro-batches, or _max)
Loss = Callable[[Tensor, Batch], tuple[Tensor, dict[str, float]]]
CLIP_NORM = 1.0
NOTHING = Row((0, 0), (0.0, 0.0))  # for a rank without rows: every rank takes part in each backward


class WorkerError(RuntimeError):
    """No step can be made; the message says why and what to do."""


def nll(logprobs_N: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The SFT loss: minus the weighted sum of logprobs."""
    loss = -(batch.weights_N * logprobs_N).sum()
    return loss, {"loss": loss.item()}


def open_worker(recipe: TrainRecipe, folder: Path) -> "Worker":
    """The model of a folder on this process's device: a GPU where there is one."""
    cluster, gpus = recipe.cluster, torch.cuda.device_count()
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    decoder = load_decoder(folder)
    if cluster.lora:
        add_lora(decoder, cluster.lora, recipe.seed)
    decoder = decoder.to(device)
    decoder.recompute = cluster.recompute
    return Worker(decoder, max_tokens=cluster.max_tokens, bf16=cluster.bf16)


class Worker:
    """A Decoder, sharded when it is one of several ranks; after `begin`, with its optimizers."""

    def __init__(self, decoder: Decoder, *, max_tokens: int = 16384, bf16: bool = False):
        several = dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.max_tokens, self.bf16 = max_tokens, bf16
        self.decoder = self._sharded(decoder)
        self.reference: Decoder | None = None
        self.device = next(decoder.parameters()).device
        self.optimizers: list[torch.optim.Optimizer] = []
        self.skipped = 0

    def begin(self, *, learning_rate: float, muon_learning_rate: float = 0.0,
              reference: Path | None = None) -> None:  # fmt: skip
        """New optimizers: Muon for the blocks' matrices, if asked, AdamW for the rest."""
        decoder, self.skipped = self.decoder, 0
        named = [(n, p) for n, p in decoder.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if p.ndim == 2 and ".layers." in n]
        chosen = {id(p) for p in matrices} if muon_learning_rate else set()
        if chosen and self.ranks > 1:
            text = "Muon needs whole matrices: set sft.muon_learning_rate=0, or cluster.ranks=1"
            raise WorkerError(text)
        rest = [p for _, p in named if id(p) not in chosen]
        self.optimizers = []
        if rest:  # LoRA's additions are matrices of blocks, all of them
            adamw = torch.optim.AdamW(rest, learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
            self.optimizers.append(adamw)
        if chosen:
            self.optimizers.append(Muon(matrices, muon_learning_rate))
        self.base_rates = [o.param_groups[0]["lr"] for o in self.optimizers]
        self.reference = None
        if reference:
            self.reference = self._sharded(load_decoder(reference).to(self.device))

    def step(
        self, rows: Sequence[Row], loss: Loss, *, rate: float = 1.0, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step over all rows at `rate` times the base learning rates."""
        totals = self._totals(rows, loss, temperature)
        norm = nn.utils.clip_grad_norm_(self.decoder.parameters(), CLIP_NORM)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self._apply(norm, rate)
        return totals | {"grad_norm": norm.item(), "skipped_updates": self.skipped}

    def measure(self, rows: Sequence[Row], loss: Loss) -> dict[str, float]:
        """The numbers of a step that is not taken."""
        with torch.no_grad():
            return self._totals(rows, loss, 1.0)

    def _totals(self, rows: Sequence[Row], loss: Loss, temperature: float) -> dict[str, float]:
        """Sums over the rows of all ranks; the gradients too, where they are wanted."""
        learn = torch.is_grad_enabled()
        shares = [bins(share, self.max_tokens) for share in spread(rows, self.ranks)]
        mine, rounds = shares[self.rank], max(map(len, shares))
        totals: dict[str, float] = {}
        for part in mine + [[NOTHING]] * (rounds - len(mine)):
            batch = pack(part).to(self.device)
            if self.reference:
                with torch.no_grad():
                    kept, _ = self._forward(self.reference, batch, temperature)
                batch = replace(batch, reference_N=kept)
            logprobs, entropies = self._forward(self.decoder, batch, temperature)
            if not len(batch.targets_N):
                if learn:
                    (0.0 * logprobs.sum()).backward()
                continue
            value, numbers = loss(logprobs, batch)
            if learn:
                (value * self.ranks).backward()  # the ranks' gradients are averaged
            counts = {"entropy": entropies.sum().item(), "trained_tokens": len(entropies)}
            _merge(totals, numbers | counts)
        if self.ranks > 1:
            found: list[Any] = [None] * self.ranks
            dist.all_gather_object(found, totals)
            totals = {}
            for numbers in found:
                _merge(totals, numbers)
        if not learn:
            self._reshard()
        totals["entropy"] = totals.get("entropy", 0.0) / max(totals.get("trained_tokens", 0), 1)
        return totals

    def _apply(self, norm: Tensor, rate: float) -> None:
        finite = bool(torch.isfinite(norm))
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped == 3:
            text = "the gradient was not finite three steps in a row: lower the learning rate"
            raise WorkerError(text)
        for optimizer, base in zip(self.optimizers, self.base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = base * rate
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def logprobs(self, row: Row, temperature: float = 1.0) -> list[float]:
        """Of a row's trained tokens."""
        batch = pack([row]).to(self.device)
        found = self._forward(self.decoder, batch, temperature)[0].tolist()
        self._reshard()
        return found

    def save(self, folder: Path, position: checkpoint.Position, digest: str,
             extra: dict[str, Any], optimizers: bool = True) -> None:  # fmt: skip
        """A checkpoint: what learns, all else that a bit-exact resume needs, and `extra`."""
        learned = {n: p for n, p in self.decoder.named_parameters() if p.requires_grad}
        state: dict[str, Any] = {"model": learned}
        if optimizers:
            state["optimizers"] = [o.state_dict() for o in self.optimizers]
        state = self._gathered(state)
        if self.rank == 0:
            checkpoint.save(folder, position, state | {"skipped": self.skipped} | extra, digest)

    @torch.no_grad()
    def load(self, folder: Path, digest: str, optimizers: bool = False) -> None:
        """The weights of the newest checkpoint, and the optimizers' state if asked."""
        found = checkpoint.load(folder, digest)
        assert found is not None
        parameters = dict(self.decoder.named_parameters())
        for name, value in found[1]["model"].items():
            parameters[name].copy_(_as(parameters[name], value))
        if not optimizers:
            return
        self.skipped = found[1]["skipped"]
        for optimizer, saved in zip(self.optimizers, found[1]["optimizers"], strict=True):
            learned = [p for group in optimizer.param_groups for p in group["params"]]
            for index, values in saved["state"].items():
                like = learned[index]
                of_parameter = {k: v for k, v in values.items() if v.shape == like.shape}
                values |= {k: _as(like, v) for k, v in of_parameter.items()}
            optimizer.load_state_dict(saved)

    def export(self, folder: Path, half: bool = False) -> None:
        """A Hugging Face folder, which is whole when the call returns."""
        state = self._gathered(self.decoder.state_dict())
        if self.rank == 0:
            save_weights(self.decoder.config, merged(state), folder, half)

    def _gathered(self, state: Any) -> Any:
        """Whole tensors on the first rank's CPU, of all of which hold a share."""

        def whole(x: Any) -> Any:
            x = x.full_tensor() if isinstance(x, DTensor) else x
            if self.rank:
                return None  # kept, these would add up to the whole model on each GPU
            return x.detach().cpu() if isinstance(x, Tensor) else x

        return tree_map(whole, state)

    def _forward(self, decoder: Decoder, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        return token_logprobs(decoder, batch, temperature=temperature, bf16=self.bf16)

    def _reshard(self) -> None:
        """A forward without a backward leaves the root whole."""
        if isinstance(self.decoder, FSDPModule):
            self.decoder.reshard()

    def _sharded(self, decoder: Decoder) -> Decoder:
        if self.ranks > 1:
            half = torch.bfloat16 if self.bf16 else None
            kinds = {"param_dtype": half, "reduce_dtype": torch.float32}
            policy = MixedPrecisionPolicy(**kinds, cast_forward_inputs=False)
            for block in decoder.model.layers:
                fully_shard(block, mp_policy=policy)
            # the head is used after the forward: the root stays whole until the backward ends
            fully_shard(decoder, mp_policy=policy, reshard_after_forward=False)
        return decoder


def _as(like: Tensor, value: Tensor) -> Tensor:
    """`value`, which every rank has whole, laid out as `like`."""
    if not isinstance(like, DTensor):
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _merge(totals: dict[str, float], numbers: dict[str, float]) -> None:
    for key, number in numbers.items():
        merge = max if key.endswith("_max") else operator.add
        totals[key] = merge(totals.get(key, 0.0), number)
