"""E1-E10 for one system: every case, several seeds, and the same conversation streamed.

In: a system, an engine. Out: the Score over all cases, and one per case.
"""

import json
from pathlib import Path

import httpx
from agents import CASES, SYSTEM, TOOL, Agent, Refused, injection, results
from score import Score, score
from tokenizers import Tokenizer

from nanoswe_proxy.render.template import Template


async def exactness(
    system, rig_url: str, folder: Path, http: httpx.AsyncClient, seeds: int
) -> dict[str, Score]:
    """Score per case, and "all"."""
    structure = Structure(folder)
    scores: dict[str, Score] = {}
    total = Score()
    for case in CASES:
        scores[case.__name__] = of_case = Score()
        for seed in range(seeds):
            name = f"{case.__name__}-{seed}"
            of_case.add(await conversation(system, rig_url, structure, http, case, name))
        total.add(of_case)
    total.replies, total.stream_differs, refused = await parity(system, rig_url, http, seeds)
    total.refused += refused
    return scores | {"all": total}


async def conversation(system, rig_url, structure, http, case, name: str) -> Score:
    began = len((await http.get(f"{rig_url}/log")).json())
    agent = Agent(http, await system.open(name))
    failed = False
    try:
        # the seed is in the first message, so that every conversation is another
        await case(Named(agent, name))
    except Refused:
        failed = True
    log = (await http.get(f"{rig_url}/log", params={"since": began})).json()
    found = score(log, await system.export(name), agent.minimum())
    found.failed = int(failed or bool(agent.errors))
    found.refused = int(failed and agent.refused)
    if case is injection:
        found.injected = structure.injected(log, agent.asked)
    return found


class Named:
    """An agent whose system messages carry the name of the conversation."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.agent, self.name, self.errors = agent, name, agent.errors

    def _named(self, messages: list[dict]) -> list[dict]:
        first = messages[0]
        return [first | {"content": f"{first['content']} ({self.name})"}, *messages[1:]]

    async def ask(self, messages, **fields):
        return await self.agent.ask(self._named(messages), **fields)

    async def hang_up(self, messages, seconds, **fields):
        await self.agent.hang_up(self._named(messages), seconds, **fields)


OPENERS = ("<|im_start|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[INST]",
           "[TOOL_RESULTS]")  # fmt: skip


class Structure:
    """How many turns the template opens for a request, whatever its texts spell."""

    def __init__(self, folder: Path) -> None:
        self.template, self.tokenizer = (
            Template(folder),
            Tokenizer.from_file(f"{folder}/tokenizer.json"),
        )
        self.ids = {self.tokenizer.token_to_id(t) for t in OPENERS} - {None}

    def count(self, ids: list[int]) -> int:
        return sum(i in self.ids for i in ids)

    def injected(self, log: list[dict], asked: list[dict]) -> int:
        """Turns that prompts open beyond the template's own: some text became structure."""
        return sum(
            max(0, self.count(entry["prompt"]) - self.written(body))
            for entry, body in zip(log, asked, strict=False)
        )

    def written(self, body: dict) -> int:
        messages = [self._harmless(m) for m in body["messages"]]
        text = self.template.render(messages, body.get("tools"), True)
        return self.count(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _harmless(self, message: dict) -> dict:
        calls = [
            {"id": "a" * 9, "type": "function", "function": {"name": "x", "arguments": {"y": "z"}}}
            for _ in message.get("tool_calls", ())
        ]
        plain = message | {"content": "x", "tool_call_id": "a" * 9}
        return plain | ({"tool_calls": calls} if calls else {})


async def parity(system, rig_url: str, http: httpx.AsyncClient, seeds: int) -> tuple[int, int, int]:
    """(replies, of which differ when streamed, refused). Compared are pairs of replies to one
    prompt: where a system writes another prompt for the same request, it is not the stream's fault.
    """
    compared = differ = 0
    for seed in range(seeds):
        base_url = await system.open(f"parity-{seed}")
        history = [SYSTEM, {"role": "user", "content": f"stream {seed}"}]
        for turn in range(8):
            body = {"model": "tiny", "messages": history, "tools": [TOOL], "max_tokens": 120}
            plain = await http.post(f"{base_url}/chat/completions", json=body)
            streamed = await folded(http, f"{base_url}/chat/completions", body | {"stream": True})
            if streamed is None:
                return compared, differ, 1
            message = {k: v for k, v in plain.json()["choices"][0]["message"].items() if v}
            first, second = (await http.get(f"{rig_url}/log", params={"since": -2})).json()
            if first["prompt"] == second["prompt"]:
                compared += 1
                differ += bare(message) != bare(streamed)
            history = [*history, message, *results(message, f"p{turn}")]
    return compared, differ, 0


async def folded(http: httpx.AsyncClient, url: str, body: dict) -> dict | None:
    """The message that a stream's deltas add up to; None if streaming is refused."""
    message: dict = {"content": ""}
    calls: dict[int, dict] = {}
    async with http.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            return None
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            for choice in json.loads(line[5:]).get("choices", ()):
                delta = choice["delta"]
                message["content"] += delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
                    for key, text in part.get("function", {}).items():
                        call[key] += text or ""
    message["tool_calls"] = [{"function": calls[i]} for i in sorted(calls)]
    return message


def bare(message: dict) -> tuple:
    calls = message.get("tool_calls") or ()
    return message.get("content") or "", [
        (c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]
