"""E1-E10 for one system: every case, several seeds, and the same conversation streamed.

In: a system, an engine. Out: the Score over all cases, and one per case.
"""

import json

import httpx
from agents import CASES, SYSTEM, TOOL, Agent, Refused, injection, results
from score import Score, score


async def exactness(system, rig_url: str, http: httpx.AsyncClient, seeds: int) -> dict[str, Score]:
    """Score per case, and "all"."""
    scores: dict[str, Score] = {}
    total = Score()
    for case in CASES:
        scores[case.__name__] = of_case = Score()
        for seed in range(seeds):
            of_case.add(await conversation(system, rig_url, http, case, f"{case.__name__}-{seed}"))
        total.add(of_case)
    total.replies, total.stream_differs, refused = await parity(system, http, seeds)
    total.refused += refused
    return scores | {"all": total}


async def conversation(system, rig_url, http, case, name: str) -> Score:
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
    if case is injection:
        found.injected = injected(log, agent)
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


def injected(log: list[dict], agent: Agent) -> int:
    """Turn openers in the prompts beyond one per message (results of one turn are one message)."""
    opener = log[0]["prompt"][0]  # a prompt begins with one
    extra = 0
    for entry, path in zip(log, agent.paths, strict=True):
        roles = ["assistant" if m[0] == "reply" else m[0] for m in path[1:-1]]
        groups = sum(r != "tool" or roles[i - 1] != "tool" for i, r in enumerate(roles))
        extra += max(0, entry["prompt"].count(opener) - groups - 1)
    return extra


async def parity(system, http: httpx.AsyncClient, seeds: int) -> tuple[int, int, int]:
    """(replies, of which differ when streamed, refused)."""
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
