"""ScriptedEngine: a deterministic engine without a model, for tests, benchmarks and demonstrations.

In: scripts (replies as text or ids), one per call of a session or computed from the prompt. Out: a
token stream with its own log of every prompt and every token: the ground truth that exports are
compared with. It can spell text in pieces that no tokenizer would choose, be cut off, wait, change
its weight version and fail.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.errors import EngineError


@dataclass(frozen=True)
class Script:
    """One reply. `text` is encoded with structural tokens; `ids`, if given, is taken as it is.

    split_seed spells ordinary tokens in random smaller pieces; `close` adds the end token;
    bump_after raises the engine's version after so many tokens; fail_after raises an error.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    close: bool = True
    split_seed: int | None = None
    delay_sec: float = 0.0
    token_delay_sec: float = 0.0
    bump_after: int | None = None
    fail_after: int | None = None


@dataclass(frozen=True)
class Logged:
    """One call as the engine saw it."""

    session: str
    prompt: tuple[int, ...]
    sampling: Sampling
    sampled: list[Sampled] = field(default_factory=list)


Scripts = Sequence[Script | str] | Callable[[str, Sequence[int], Sampling], Script | str]


class ScriptedEngine:
    """See `engine.base.Engine`."""

    def __init__(self, model: Path | str, scripts: Scripts, *, max_context: int = 8192) -> None:
        self.tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self.scripts, self.max_context = scripts, max_context
        self._added = frozenset(self.tokenizer.get_added_tokens_decoder())
        self.version = 0
        self.log: list[Logged] = []
        self.released: list[str] = []
        self._calls: Counter[str] = Counter()

    @classmethod
    def from_spec(cls, argument: str, model: Path) -> "ScriptedEngine":
        """`argument`: a JSON file with a list of texts or of Script fields."""
        items = json.loads(Path(argument).read_text(encoding="utf-8"))
        return cls(model, [Script(**i) if isinstance(i, dict) else i for i in items])

    async def generate(
        self, session: str, ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Sampled]:
        script = self._script(session, ids, sampling)
        entry = Logged(session, tuple(ids), sampling)
        self.log.append(entry)
        await asyncio.sleep(script.delay_sec)
        for n, token in enumerate(self._tokens(script, sampling)[: sampling.max_tokens]):
            if n == script.fail_after:
                raise EngineError("scripted failure")
            if n == script.bump_after:
                self.version += 1
            if script.token_delay_sec:
                await asyncio.sleep(script.token_delay_sec)
            logprob = -(1 + (token + 7 * n) % 97) / 64  # exact in binary, another at each place
            entry.sampled.append(Sampled(token, logprob, self.version))
            yield entry.sampled[-1]
            if token in sampling.stop_ids:
                return

    async def release(self, session: str) -> None:
        self.released.append(session)
        self._calls.pop(session, None)

    def _script(self, session: str, ids: Sequence[int], sampling: Sampling) -> Script:
        n = self._calls[session]
        self._calls[session] += 1
        if callable(self.scripts):
            script = self.scripts(session, ids, sampling)
        elif n < len(self.scripts):
            script = self.scripts[n]
        else:
            raise EngineError(f"the script has {len(self.scripts)} replies; this is call {n + 1}")
        return Script(script) if isinstance(script, str) else script

    def _tokens(self, script: Script, sampling: Sampling) -> list[int]:
        ids = list(script.ids or self.tokenizer.encode(script.text, add_special_tokens=False).ids)
        if script.split_seed is not None:
            dice = random.Random(script.split_seed)
            ids = [i for t in ids for i in (self._pieces(t) if dice.random() < 0.5 else [t])]
        return [*ids, sampling.stop_ids[0]] if script.close else ids

    def _pieces(self, token: int) -> list[int]:
        """The same text, one character at a time; what cannot be spelled so stays whole."""
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        pieces = [i for c in text for i in self.tokenizer.encode(c, add_special_tokens=False).ids]
        spelled = self.tokenizer.decode(pieces, skip_special_tokens=False) == text
        return pieces if spelled and token not in self._added and "\ufffd" not in text else [token]
