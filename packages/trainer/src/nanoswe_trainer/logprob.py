"""A Decoder and a Batch in; per trained token its logprob and the entropy of the distribution it
came from, out.

The head runs on trained positions only and in chunks that are recomputed in the backward pass, so
(T, vocabulary) never exists at once. Everything after the head is fp32.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanoswe_trainer.model import Decoder, packed_attention
from nanoswe_trainer.pack import Batch

PerToken = tuple[Tensor, Tensor]  # logprobs_N, entropies_N
CHUNK, CHUNK_LOGITS = 4096, 2**26  # at most so many rows, and rows x vocabulary, at once


def _head(decoder: Decoder, hidden_ND: Tensor, targets_N: Tensor, temperature: float) -> PerToken:
    logits = decoder.head(hidden_ND).float()
    all_logprobs = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(1, targets_N[:, None])[:, 0], entropy


def token_logprobs(
    decoder: Decoder, batch: Batch, *, temperature: float = 1.0, bf16: bool = False
) -> PerToken:
    """(logprobs_N, entropy_N) in fp32, at the temperature that the engine sampled with."""
    device = batch.ids_T.device.type
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        attend = packed_attention(batch.lengths, device)
        hidden = decoder(batch.ids_T, batch.positions_T, attend)
        rows = hidden.index_select(0, batch.predictors_N)
        chunk = max(1, min(CHUNK, CHUNK_LOGITS // decoder.config.vocab_size))
        chunks = [*zip(rows.split(chunk), batch.targets_N.split(chunk), strict=True)]
        if len(chunks) == 1:  # its logits are there at the end of the forward, kept or not
            return _head(decoder, *chunks[0], temperature)
        parts = [
            checkpoint(_head, decoder, *one, temperature, use_reentrant=False) for one in chunks
        ]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, entropy
