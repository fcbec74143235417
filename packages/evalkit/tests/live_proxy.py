"""The real proxy before its scripted engine, over HTTP, with a session for each try of a trial.

In: replies as the engine samples them. Out: `open` and `close` for `run_trials`, and the sealed
trajectories by trial. Its model is a tokenizer made here: bytes and ChatML, no weights.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoswe_proxy.app import serve
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.proxy import Proxy
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.trajectory import Trajectory


def use(name: str, **arguments: Any) -> str:
    """A reply that calls a tool."""
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def tokenizer_folder(folder: Path) -> None:
    """A tokenizer of bytes, with ChatML."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for special, names in (
        (True, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
        (False, ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    ):
        tokenizer.add_tokens([AddedToken(n, special=special, normalized=False) for n in names])
    tokenizer.save(str(folder / "tokenizer.json"))


class LiveProxy:
    def __init__(self, proxy: Proxy, engine: ScriptedEngine) -> None:
        self.proxy, self.engine = proxy, engine
        self.sealed: dict[str, Trajectory] = {}
        self._caps: dict[tuple[str, int], str] = {}

    async def open(self, trial_id: str, try_: int) -> str:
        cap = self.proxy.open(trial_id, try_)
        self._caps[trial_id, try_] = cap
        return self.proxy.base_url(cap)

    async def close(self, trial_id: str, try_: int) -> int:
        sealed = await self.proxy.seal(self._caps.pop((trial_id, try_)))
        self.sealed[trial_id] = sealed
        return sum(turn.delivery in ("delivered", "acknowledged") for turn in sealed.turns)


@asynccontextmanager
async def live_proxy(
    folder: Path, scripts: Sequence[Script | str], max_context: int = 200_000
) -> AsyncIterator[LiveProxy]:
    tokenizer_folder(folder)
    engine = ScriptedEngine(folder, scripts, max_context=max_context)
    proxy = Proxy(engine, Renderer(folder), max_tokens=4000)
    async with serve(proxy):
        yield LiveProxy(proxy, engine)
