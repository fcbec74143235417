"""The engine of the benchmark: scripted, without a model, over HTTP, with its own log.

In: a model folder and a port. Out: vLLM's and SGLang's endpoints, and `/log`: every prompt it saw
and every token it gave, which no proxy can touch: the ground truth. What it says is a pure function
of (seed, prompt ids): tool calls, parallel calls, text, characters of several tokens, malformed
calls, endless text; spelled in pieces that no tokenizer would choose.

    python rig.py --folder DIR --port 0 [--fast]     prints its URL; --fast: one short reply, always
"""

import argparse
import asyncio
import json
import random
import sys
import zlib
from array import array
from pathlib import Path
from types import SimpleNamespace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/proxy/tests"))
from engine_server import Server

from nanoswe_proxy.app import serve
from nanoswe_proxy.engine.scripted import Script, ScriptedEngine
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.render.template import Template

WORDS = "left right return the quick brown fox sum of width scan é 日本 🙂 \n\n    def".split(" ")


class Speaker:
    """Replies to prompts, in the syntax of the model folder's own family."""

    def __init__(self, renderer: Renderer, seed: int) -> None:
        self.renderer, self.seed = renderer, seed

    def __call__(self, _, ids, sampling) -> Script:
        dice = random.Random(zlib.crc32(array("I", ids).tobytes(), self.seed))
        text = " ".join(dice.choices(WORDS, k=dice.randint(1, 8)))
        kind = dice.choices(
            ["call", "calls", "talk", "text", "malformed", "endless", "quote"],
            [45, 12, 12, 15, 6, 5, 5],
        )[0]
        split = dice.randrange(1 << 30)
        if kind in ("malformed", "endless", "quote"):
            said = {
                "malformed": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls',
                "endless": text * 200,
                "quote": 'it printed "<|im_e' + f'nd|>" {text}',
            }
            return Script(said[kind], split_seed=split)
        spaces = dice.choice(["", " ", "\n"]) if kind == "text" else ""
        calls = [self._call(dice) for _ in range({"calls": 2, "text": 0}.get(kind, 1))]
        content = text if kind in ("talk", "text") else ""
        return Script(ids=self._spelled(spaces + content, calls), split_seed=split, close=False)

    @staticmethod
    def _call(dice: random.Random) -> dict:
        said = " ".join(dice.choices(WORDS, k=dice.randint(1, 4)))
        arguments = {"command": f"cat {said}", "n": dice.randint(0, 9), "a": dice.random() < 0.5}
        text = json.dumps(arguments, ensure_ascii=dice.random() < 0.5)
        return {"name": "bash", "arguments": text, "id": "call00000"}

    def _spelled(self, content: str, calls: list[dict]) -> tuple[int, ...]:
        reply = {"role": "assistant", "content": content} | ({"calls": calls} if calls else {})
        then = [{"role": "tool", "content": "t", "call_id": "call00000"} for _ in calls]
        then = then or [{"role": "user", "content": "u"}]
        conversation = [{"role": "user", "content": "u"}, reply, *then]
        conversation.append({"role": "assistant", "content": "end"})
        return tuple(self.renderer.sampled(conversation, None)[1])


def chat_rendering(folder: Path, renderer: Renderer):
    """What vLLM's chat endpoint does: template to text to ids, at every turn from the start."""
    template, full = Template(folder), renderer.codec.full

    def render(messages: list[dict], tools: list[dict] | None) -> list[int]:
        plain = []
        for message in messages:
            m = dict(message)
            if isinstance(m.get("content"), list):
                m["content"] = "".join(p.get("text", "") for p in m["content"])
            m["content"] = m.get("content") or ""
            for call in m.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = _maybe(arguments)
            plain.append(m)
        return full.encode(template.render(plain, tools, True), add_special_tokens=False).ids

    def parse(ids: list[int]) -> dict:
        parsed = renderer.parse(ids, truncated=ids[-1] not in renderer.stop_ids)
        message: dict = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["tool_calls"] = [
                {"id": f"call_{random.randrange(1 << 40):x}", "type": "function",
                 "function": {"name": c.name, "arguments": c.arguments}}
                for c in parsed.calls
            ]  # fmt: skip
        return message

    return render, parse


def _maybe(text):
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


async def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--context", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--fast", action="store_true")
    given = options.parse_args()
    short, renderer = Script("ok", close=True), Renderer(given.folder)
    scripts = (lambda *_: short) if given.fast else Speaker(renderer, given.seed)
    engine = ScriptedEngine(given.folder, scripts, max_context=given.context)
    render, parse = chat_rendering(given.folder, renderer)
    if given.fast:  # a prompt of as many ids, without the work of a chat template

        def render(messages: list[dict], tools: list[dict] | None) -> list[int]:
            return [5] * (sum(len(m["content"]) for m in messages) // 4)

    server = Server(engine, renderer.stop_ids, tokens_path=True, render=render, parse=parse)

    async def log(request: Request) -> Response:
        server.bodies.clear()
        entries = engine.log[int(request.query_params.get("since", 0)) :]
        return JSONResponse([
            {"prompt": list(e.prompt), "sampled": [(s.token, s.logprob) for s in e.sampled]}
            for e in entries
        ])  # fmt: skip

    async def health(request: Request) -> Response:
        return JSONResponse({})

    app = server.app()
    app.router.routes += [Route("/log", log), Route("/health", health)]
    async with serve(SimpleNamespace(), port=given.port, app=app) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
