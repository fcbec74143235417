"""The toy task of B7, with a tool, of four turns: a line of noise, of any length, ends with one of
eight keys; the reply must be that key's call and then the end token, within six tokens. What the
tool then says ends with the next key. A turn earns a half for the right call and a half for ending
after it.
"""

import random

from nanoswe_trainer.model import ModelConfig

CONFIG = ModelConfig(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                     num_attention_heads=2)  # fmt: skip
KEYS, CALL, END, NOISE = 8, 8, 16, 20  # keys 0-7, the calls 8-15, the end 16, noise from 20 on
GROUPS, SIZE, TURNS, MOST = 8, 8, 4, 6


class Trial:
    """The tool's side of one conversation; which keys come is the group's."""

    def __init__(self, group: str):
        self.rng, self.earned, self.turn = random.Random(group), 0.0, 0
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.observe()

    def observe(self) -> None:
        self.key = self.rng.randrange(KEYS)
        seen = [self.rng.randrange(NOISE, 64) for _ in range(self.rng.randint(4, 40))]
        self.take([*seen, self.key], [0.0] * (len(seen) + 1), 0)

    def take(self, ids: list[int], logprobs: list[float], sampled: int) -> None:
        self.ids, self.logprobs = self.ids + ids, self.logprobs + logprobs
        self.mask += [sampled] * len(ids)

    def reply(self, ids: list[int], logprobs: list[float]) -> None:
        right = ids[0] == CALL + self.key
        self.earned += 0.5 * right + 0.5 * (right and ids[1:] == [END])
        self.take(ids, logprobs, 1)
        self.turn += 1
        if self.turn < TURNS:
            self.observe()


def trials(seed: int, step: int) -> list[Trial]:
    return [Trial(f"{seed}/{step}/{i // SIZE}") for i in range(GROUPS * SIZE)]
