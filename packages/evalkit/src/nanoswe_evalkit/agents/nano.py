"""`nano`: the whole agent on one page. One bash tool, over the OpenAI chat API.

In: a task and a sandbox. Out: FINISHED when the model runs `submit`, PLAIN_TEXT when it calls no
tool (there is no nudge), CONTEXT when it has no tokens left, MAX_TURNS. The model's own messages
are sent back as they came. Refuses (ModelError) a service that fails or does not answer in the
API's form.
"""

import json
from contextlib import suppress
from typing import Any

from nanoswe_evalkit.agents.base import Job, ModelError, ServedAgent, is_too_long, refused
from nanoswe_evalkit.outcome import Stop
from nanoswe_evalkit.sandboxes.base import Sandbox

SYSTEM_PROMPT = "You fix one bug. Use bash. Say submit when done."
TOOLS = [
    {"type": "function", "function": {"name": "bash",
    "description": "Run a bash command in the repository. `submit` ends the work.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}},
    "required": ["command"]}}}
]  # fmt: skip


class NanoAgent(ServedAgent):
    async def run(self, job: Job) -> Stop:
        messages = job.messages
        messages.append({"role": "system", "content": SYSTEM_PROMPT})
        messages.append({"role": "user", "content": job.task.instruction})
        for _ in range(self.max_turns):
            choice = await self._complete(job)
            if choice is None:
                return Stop.CONTEXT
            messages.append(choice["message"])
            calls = choice["message"].get("tool_calls")
            if not calls:
                return Stop.CONTEXT if choice.get("finish_reason") == "length" else Stop.PLAIN_TEXT
            for call in calls:
                command, name = _command(call)
                if command is not None and command.strip() == "submit":
                    return Stop.FINISHED
                content = await _observe(job.sandbox, command)
                messages.append({"role": "tool", "tool_call_id": name, "content": content})
        return Stop.MAX_TURNS

    async def _complete(self, job: Job) -> dict[str, Any] | None:
        """One model call; None when the conversation no longer fits the model's context."""
        model = job.model
        sampling = {key: getattr(model, key) for key in ("temperature", "max_tokens", "seed")}
        sampling |= model.sampling
        body = {"model": model.name, "messages": job.messages, "tools": TOOLS, **sampling}
        response = await self.ask(job, "POST", "/chat/completions", body)
        if is_too_long(response.status_code, response.text):
            return None
        if response.status_code != 200:
            raise refused(job.base_url, response)
        try:
            choice: dict[str, Any] = response.json()["choices"][0]
            if choice["message"]["role"] != "assistant":
                raise ValueError("not an assistant message")
            if not isinstance(choice["message"].get("tool_calls") or [], list):
                raise ValueError("tool_calls is not a list")
            return choice
        except (ValueError, LookupError, TypeError) as error:
            raise ModelError(f"model at {job.base_url}: no chat completion ({error!r})") from error


def _command(call: Any) -> tuple[str | None, str]:
    """(the command of a well-formed call of our one tool, the call's id)"""
    call = call if isinstance(call, dict) else {}
    name = str(call.get("id") or "")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        command = json.loads(call["function"]["arguments"])["command"]
        if name and call["function"].get("name") == "bash" and isinstance(command, str):
            return command, name
    return None, name


async def _observe(sandbox: Sandbox, command: str | None) -> str:
    if command is None:
        return 'error: call bash with {"command": "..."}'
    result = await sandbox.run(["bash", "-c", command])
    content = result.stdout.decode("utf-8", errors="replace") or "(no output)"
    if result.timed_out:
        return f"{content}\n[timed out]"
    if result.exit_code:
        return f"{content.rstrip(chr(10))}\n[exit {result.exit_code}]"
    return content
