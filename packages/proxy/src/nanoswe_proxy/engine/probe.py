"""What an engine does, measured before it serves: a few tokens, by the protocol of every call.

In: an engine and its renderer. Out: facts, to print and to keep. Refuses (EngineError) one that is
silent, gives ids that the tokenizer does not have or logprobs that are none, or does not stop. A
scripted one is not asked: its replies are counted.
"""

import math
from contextlib import nullcontext, suppress

from nanoswe_proxy.engine.base import Engine, Sampled, Sampling
from nanoswe_proxy.engine.scripted import ScriptedEngine
from nanoswe_proxy.errors import EngineError
from nanoswe_proxy.render.base import Renderer


async def probe(engine: Engine, renderer: Renderer) -> dict:
    """Facts by name. Logprobs are the model's (raw), or those of what is sampled from."""
    facts = {"engine": type(engine).__name__, "max_context": engine.max_context,
             "version": engine.version, "witnesses": renderer.extended}  # fmt: skip
    if isinstance(engine, ScriptedEngine):
        return facts
    prompt = renderer.root([{"role": "user", "content": "Say something."}], None, {}).ids
    named = renderer.codec.full.id_to_token

    async def say(temperature: float, key: str, *stops: int) -> list[Sampled]:
        how = Sampling(temperature, 8, (*renderer.stop_ids, *stops), key)
        for last in (False, False, True):
            with nullcontext() if last else suppress(EngineError):  # it may be busy for a moment
                said = [s async for s in engine.generate("probe", prompt, how)]
                break
        fit = all(named(s.token) and math.isfinite(s.logprob) for s in said)
        if not said or not fit or set(how.stop_ids) & {s.token for s in said[:-1]}:
            raise EngineError(f"unfit engine: asked to stop at {how.stop_ids} it gave {said}")
        return said

    first, again, other = [await say(1.0, key) for key in ("a", "a", "b")]
    cold, cool = [await say(temperature, "a") for temperature in (0.01, 0.02)]
    await say(1.0, "a", first[0].token)
    await engine.release("probe")
    same = cold[0].token == cool[0].token and cold[0].logprob == cool[0].logprob < -1e-3
    facts |= {"seeds_repeat": first == again, "seeds_differ": first != other}
    return facts | {"logprobs": "raw (train at temperature 1)" if same else "of what is sampled"}
