"""What command-line agents were seen to send (test_coders.py runs them), without them: what they
change on the way must not break a row, and what nobody may change must.
"""

import asyncio

import pytest
from test_stream import running

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "all": {"type": "boolean"}}}
EDIT = '<tool_call>\n{"name": "edit", "arguments": {"path": "left"}}\n</tool_call>'
RESULT = {"type": "tool_result", "content": "right"}


def claude_code(turn, messages):
    """A request's body: a line that is new each time, and a cache marker that moves."""
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; n={turn};"},
              {"type": "text", "text": "Fix.", "cache_control": {"type": "ephemeral"}}]  # fmt: skip
    tools = [{"name": "edit", "description": "d", "input_schema": SCHEMA}]
    *rest, last = messages
    marked = last | {"cache_control": {"type": "ephemeral"}} if isinstance(last, dict) else last
    return {"model": "m", "max_tokens": 150, "system": system, "messages": [*rest, marked],
            "tools": tools, "thinking": {"type": "adaptive"}}  # fmt: skip


@pytest.mark.parametrize(("filled", "forks"), [
    ({"all": False}, []), ({"all": None}, []), ({"all": True}, ["assistant_edited"] * 2),
    ({"path": "right"}, ["assistant_edited"] * 2),
])  # fmt: skip
def test_claude_code_remarks_in_the_middle_and_completes_arguments(folder, filled, forks):
    """It puts a system message after the user's, and writes a schema's defaults into its calls."""

    async def main():
        async with running(folder, [EDIT, EDIT, "left"]) as (proxy, client):
            cap = proxy.open("t.0")
            said = [{"type": "text", "text": "go"}]
            messages = [{"role": "user", "content": said}, {"role": "system", "content": "Agents."}]
            for turn in range(3):
                body = claude_code(turn, messages)
                answer = await client.post(f"/s/{cap}/v1/messages", json=body)
                assert answer.status_code == 200, answer.text
                reply = answer.json()["content"]
                if reply[0]["type"] == "tool_use":
                    reply[0]["input"] |= filled
                    result = RESULT | {"tool_use_id": reply[0]["id"]}
                    messages += [{"role": "assistant", "content": reply},
                                 {"role": "user", "content": [result]}]  # fmt: skip
            return await proxy.seal(cap)

    trajectory = asyncio.run(main())
    assert [t.fork for t in trajectory.turns if t.fork] == forks
    assert len(trajectory.samples) == 1 + len(forks)
    assert trajectory.conservation.masked == {}
