"""The keys and values of the embedded engine's slots: pieces of token rows in, logits out, each
token seeing what its slot holds before it.

All pieces of a step go through the layers as one row of tokens; attention is a call for each chunk
of a prompt, and one for neighbouring slots that decode. A token's numbers must not depend on what
is computed beside it: whether they do, to the bit, is tried at the start with this model on this
machine, and where they do every forward has one of two fixed shapes.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoswe_trainer.model import Decoder

CHUNK, MOST_CHUNKS = 32, 8  # tokens of a chunk of a prompt; chunks of a step
ROWS, TRIES = 8, 8  # a forward computes a multiple of so many tokens
Piece = tuple[int, int, list[int]]  # slot, position of the first token, tokens


class Cache:
    """`pair`: keys and values, by layer, slot, head and position."""

    def __init__(self, decoder: Decoder, slots: int, max_context: int, bf16: bool):
        config, self.decoder, self.slots = decoder.config, decoder, slots
        self.device, self.bf16 = next(decoder.parameters()).device, bf16
        # spare: a slot for the writes of unused rows, and room for what is past the end
        self.room = max_context + CHUNK
        shape = (config.num_hidden_layers, slots + 1, config.num_key_value_heads, self.room)
        self.pair = [torch.zeros(*shape, config.head_dim, device=self.device) for _ in range(2)]
        self.steady, self.span = True, 64 * -(-self.room // 1024)  # decoding sees multiples of it
        if not self._alone_as_in_company():
            self.steady, self.span = False, self.room

    @torch.inference_mode()
    def forward(self, pieces: list[Piece], ready: int) -> Tensor:
        """Logits of the first `ready` pieces: one token each, in the order of their slots."""
        rows, tokens = self.slots, self.slots
        if self.steady:
            rows, tokens = ready + -ready % ROWS, sum(len(ids) for *_, ids in pieces)
            tokens += -tokens % ROWS
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            if not self.steady and len(pieces) > ready:
                self._forward(pieces[ready:], 0, MOST_CHUNKS * CHUNK)
                pieces = pieces[:ready]
            return self.decoder.head(self._forward(pieces, ready, tokens)[:rows])[:ready].float()

    def _forward(self, pieces: list[Piece], ready: int, rows: int) -> Tensor:
        """Hidden states; the rows that are left, up to `rows`, compute for nothing."""
        config, device = self.decoder.config, self.device
        kv, size = config.num_key_value_heads, config.head_dim
        repeat = config.num_attention_heads // kv
        flat = [(slot, start + i, token) for slot, start, ids in pieces
                for i, token in enumerate(ids)]  # fmt: skip
        flat += [(self.slots, 0, 0)] * (rows - len(flat))
        slots_T, at_T, ids_T = torch.tensor(flat, device=device).T
        parts: list[Any] = []  # rows, their keys and values by layer, what each may see of them
        edges = [i for i in range(ready) if not i or pieces[i][0] != pieces[i - 1][0] + 1]
        for first, last in pairwise([*edges, ready] if ready else []):  # of neighbouring slots
            end = max(start for _, start, _ in pieces[first:last]) // self.span * self.span
            end, slot = min(end + self.span, self.room), flat[first][0]
            seen = (torch.arange(end, device=device) <= at_T[first:last, None])[:, None, None]
            past = (x[:, slot : slot + last - first, :, :end].unbind(0) for x in self.pair)
            parts.append((slice(first, last), *past, torch.where(seen, 0.0, -math.inf)))
        first = ready
        for slot, start, ids in pieces[ready:]:
            end = start + CHUNK  # always as wide: equal chunks have equal numbers
            seen = torch.ones(CHUNK, end, device=device).tril(start).repeat(repeat, 1) > 0
            past = (x[:, slot : slot + 1, :, :end].unbind(0) for x in self.pair)
            parts.append((slice(first, first + len(ids)), *past, torch.where(seen, 0.0, -math.inf)))
            first += len(ids)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, new in zip(self.pair, (k, v), strict=True):
                cache[layer][slots_T, :, at_T] = new.to(cache.dtype)
            q = q.view(rows, kv, repeat, size)
            out = torch.zeros_like(q)
            for where, keys, values, mask in parts:
                # grouped queries are more rows of their key head, so keys are never repeated
                x, chunk = q[where], where.start >= ready
                if chunk:
                    x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, CHUNK - len(x))).permute(1, 2, 0, 3)
                    x = x.reshape(1, kv, repeat * CHUNK, size)
                x = F.scaled_dot_product_attention(x, keys[layer], values[layer], mask)
                if chunk:
                    x = x.view(kv, repeat, CHUNK, size).permute(2, 0, 1, 3)
                out[where] = x[: where.stop - where.start]
            return out

        return self.decoder(ids_T, at_T, attend)

    def _alone_as_in_company(self) -> bool:
        """Whether a token has the same logits with more, and longer, rows and chunks beside it."""
        most, last = self.slots - 1, self.room - CHUNK - 1
        for cache in self.pair:
            cache.normal_(generator=torch.Generator(self.device).manual_seed(0))
        for i in range(TRIES):
            one = most, last * i // TRIES, [1]
            others = [(slot, last, [1]) for slot in range(most - most * (i % 4) // 3, most)]
            chunks = [(self.slots, 0, [1] * CHUNK)] * (i % (MOST_CHUNKS + 1))
            company = self.forward([*others, one, *chunks], len(others) + 1)
            if not torch.equal(company[-1:], self.forward([one], 1)):
                return False
        return True
