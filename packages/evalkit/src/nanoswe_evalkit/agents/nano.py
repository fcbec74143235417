"""`nano`: the whole agent on one page. One bash tool, over the OpenAI chat API.

In: a task and a sandbox. Out: FINISHED when the model runs `submit`, PLAIN_TEXT when it calls no
tool (there is no nudge), CONTEXT when it has no tokens left, MAX_TURNS. The model's own messages
are sent back as they came. Refuses (ModelError) a service that fails or does not answer in the
API's form.
"""

import json
from typing import Any

import httpx

from nanoswe_evalkit.agents.base import Job, Message, ModelConfig, ModelError
from nanoswe_evalkit.outcome import Stop
from nanoswe_evalkit.sandboxes.base import Sandbox

SYSTEM_PROMPT = "You fix one bug. Use bash. Say submit when done."
TOOLS = [
    {"type": "function", "function": {"name": "bash",
    "description": "Run a bash command in the repository. `submit` ends the work.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}},
    "required": ["command"]}}}
]  # fmt: skip


class NanoAgent:
    """Holds the one HTTP client that all trials share."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self._client = httpx.AsyncClient(limits=httpx.Limits(), trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, job: Job) -> Stop:
        messages = job.messages
        messages.append({"role": "system", "content": SYSTEM_PROMPT})
        messages.append({"role": "user", "content": job.task.instruction})
        for _ in range(self.max_turns):
            with job.asking():
                choice = await self._complete(job.base_url, job.model, messages)
            if choice is None:
                return Stop.CONTEXT
            messages.append(choice["message"])
            calls = choice["message"].get("tool_calls")
            if not calls:
                return Stop.CONTEXT if choice.get("finish_reason") == "length" else Stop.PLAIN_TEXT
            for call in calls:
                command = _command(call)
                if command is not None and command.strip() == "submit":
                    return Stop.FINISHED
                content = await _observe(job.sandbox, command)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return Stop.MAX_TURNS

    async def _complete(
        self, base_url: str, model: ModelConfig, messages: list[Message]
    ) -> dict[str, Any] | None:
        """One model call; None when the conversation no longer fits the model's context."""
        sampling = {key: getattr(model, key) for key in ("temperature", "max_tokens", "seed")}
        sampling |= model.sampling
        body = {"model": model.name, "messages": messages, "tools": TOOLS, **sampling}
        options: Any = {"headers": model.headers, "timeout": model.timeout_sec}
        url = f"{base_url.rstrip('/')}/chat/completions"
        try:
            response = await self._client.post(url, json=body, **options)
        except httpx.HTTPError as error:
            raise ModelError(f"model at {base_url}: {type(error).__name__} {error}") from error
        if response.status_code == 400 and "context" in response.text.lower():
            return None
        if response.status_code != 200:
            text = " ".join(response.text.split())[:300]
            raise ModelError(f"model at {base_url}: HTTP {response.status_code} {text}")
        try:
            choice: dict[str, Any] = response.json()["choices"][0]
            if choice["message"]["role"] != "assistant":
                raise ValueError("not an assistant message")
            return choice
        except (ValueError, LookupError, TypeError) as error:
            raise ModelError(f"model at {base_url}: not a chat completion ({error!r})") from error


def _command(call: Message) -> str | None:
    """The command of a well-formed call of our one tool."""
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        well_formed = call["function"].get("name") == "bash" and isinstance(command, str)
    except (ValueError, LookupError, TypeError):
        return None
    return command if well_formed else None


async def _observe(sandbox: Sandbox, command: str | None) -> str:
    if command is None or "\0" in command:
        return 'error: call bash with {"command": "..."}'
    result = await sandbox.run(["bash", "-c", command])
    content = result.stdout.decode("utf-8", errors="replace") or "(no output)"
    if result.timed_out:
        return f"{content}\n[timed out]"
    if result.exit_code:
        return f"{content.rstrip(chr(10))}\n[exit {result.exit_code}]"
    return content
