"""Messages and Responses over a real socket: streamed equals whole, ids come back as echoes, errors
have the form that clients read, and no dialect breaks the exactness of a session.
"""

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_stream import CALL, frames, running

from nanoswe_proxy.app import DIALECTS
from nanoswe_proxy.engine.scripted import Script
from nanoswe_proxy.errors import BadRequest

SCALARS = st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", "user", "text"])
KEYS = st.sampled_from([
    "role", "content", "text", "type", "tool_calls", "function", "name", "arguments", "id", "input",
    "tool_call_id", "thinking", "signature", "summary", "call_id", "output", "encrypted_content",
])  # fmt: skip
TYPES = st.sampled_from(["assistant", "user", "tool_result", "tool_use", "thinking", "message",
                         "function_call", "function_call_output", "reasoning", "text"])  # fmt: skip
ANYTHING = st.recursive(
    SCALARS | TYPES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=4)
)
FIELDS = ("system", "instructions", "tools", "stop", "stop_sequences", "stream_options", "n",
          "max_tokens", "max_output_tokens", "stream", "model", "tool_choice", "echo", "logprobs",
          "best_of", "suffix")  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
@given(said=st.lists(ANYTHING, max_size=3) | ANYTHING, more=st.dictionaries(
    st.sampled_from(FIELDS), ANYTHING, max_size=3))  # fmt: skip
@example(said=[{"role": ["user"], "content": "x"}], more={})
@example(said=[{"role": "user", "content": 5}], more={})
@example(said=[{"role": "user", "content": "x"}], more={"stream_options": 5})
@example(said=[{"role": "user", "content": "x"}], more={"tools": {"role": None}})
def test_whatever_is_sent_is_a_request_or_refused(dialect, said, more):
    """No JSON is a fault of ours: a request is read, or it is a 400 with a reason."""
    body = {"messages": said, "input": said, "prompt": said, **more}
    with suppress(BadRequest):
        dialect.parse(json.dumps(body).encode())


TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}
SAID = "left é\n" + CALL.removeprefix("so\n")
PLAIN = SAID.replace("é", "e").replace("🦊", "fox")


def of_messages(messages):
    tools = [{"name": "bash", "description": "d", "input_schema": TOOL}]
    return {"model": "m", "max_tokens": 150, "system": [{"type": "text", "text": "S"}],
            "tools": tools, "messages": messages}  # fmt: skip


def of_responses(items):
    tools = [{"type": "function", "name": "bash", "parameters": TOOL}, {"type": "web_search"}]
    return {"model": "m", "instructions": "S", "input": items, "tools": tools, "store": False}


def fold_messages(text):
    """The message that the events add up to."""
    blocks, message = [], None
    for event in map(json.loads, frames(text)):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    block["json"] = block.get("json", "") + delta["partial_json"]
            case "content_block_stop":
                block = blocks[event["index"]]
                if "json" in block:
                    block["input"] = json.loads(block.pop("json"))
            case "message_delta":
                message |= event["delta"]
    assert event["type"] == "message_stop"
    return message | {"content": blocks}


@pytest.mark.parametrize(("said", "seed"), [(SAID, None), (PLAIN, 3)])
def test_messages(folder, said, seed):
    async def main():
        async with running(folder, lambda *_: Script(said, split_seed=seed)) as (proxy, client):
            cap = proxy.open("t.0")
            path, messages = f"/s/{cap}/v1/messages", [{"role": "user", "content": "go"}]
            counted = await client.post(f"{path}/count_tokens", json=of_messages(messages))
            whole = (await client.post(path, json=of_messages(messages))).json()
            assert whole["stop_reason"] == "tool_use"
            assert counted.json()["input_tokens"] == whole["usage"]["input_tokens"]
            assert whole["usage"]["input_tokens"] == len(proxy.engine.log[0].prompt)
            assert [b["type"] for b in whole["content"]] == ["text", "tool_use"]
            assert whole["content"][1]["input"] == {"command": "cat fox" if seed else "cat 🦊"}
            result = {"type": "tool_result", "tool_use_id": whole["content"][1]["id"],
                      "content": [{"type": "text", "text": "1", "cache_control": {}}]}  # fmt: skip
            messages += [
                {"role": "assistant", "content": whole["content"]},
                {"role": "user", "content": [result, {"type": "text", "text": "on"}]},
            ]
            body = of_messages(messages) | {"stream": True}
            streamed = fold_messages((await client.post(path, json=body)).text)
            assert [b | {"id": ""} for b in streamed["content"]] == [
                b | {"id": ""} for b in whole["content"]
            ]
            assert streamed["stop_reason"] == "tool_use"
            trajectory = await proxy.seal(cap)
            assert [t.fork for t in trajectory.turns] == ["", ""]
            assert trajectory.conservation.trained == trajectory.conservation.sampled
            late = await client.post(path, json=body)
            assert (late.status_code, late.json()["type"]) == (409, "error")

    asyncio.run(main())


@pytest.mark.parametrize(("said", "seed"), [(SAID, None), (PLAIN, 3)])
def test_responses(folder, said, seed):
    async def main():
        async with running(folder, lambda *_: Script(said, split_seed=seed)) as (proxy, client):
            cap = proxy.open("t.0")
            path, items = f"/s/{cap}/v1/responses", [{"role": "user", "content": "go"}]
            whole = (await client.post(path, json=of_responses(items))).json()
            assert whole["status"] == "completed"
            text, call = whole["output"]
            assert text["content"][0]["text"] == ("left e" if seed else "left é")
            assert json.loads(call["arguments"]) == {"command": "cat fox" if seed else "cat 🦊"}
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
            body = of_responses([*items, text, call, output]) | {"stream": True}
            events = list(map(json.loads, frames((await client.post(path, json=body)).text)))
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
            spoken = "".join(
                e["delta"] for e in events if e["type"] == "response.output_text.delta"
            )
            assert (
                spoken == ("left e" if seed else "left é")
                and events[-1]["type"] == "response.completed"
            )
            streamed = events[-1]["response"]["output"]
            assert [i["type"] for i in streamed] == ["message", "function_call"]
            assert streamed[1]["arguments"] == call["arguments"]
            trajectory = await proxy.seal(cap)
            assert [t.fork for t in trajectory.turns] == ["", ""] and len(trajectory.samples) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("messages", of_messages([]), "at least one"),
        ("messages", of_messages([{"role": "tool"}]), "user or assistant"),
        ("messages", of_messages([{"role": "user", "content": [{"type": "image"}]}]), "be text"),
        ("messages", of_messages([{"role": "user", "content": "left " * 3000}]), "too long"),
        ("responses", of_responses([{"type": "computer_call"}]), "computer_call"),
        ("responses", of_responses([]) | {"instructions": ""}, "at least one"),
        ("responses", of_responses("x") | {"previous_response_id": "r"}, "previous_response_id"),
    ],
)
def test_errors_in_each_form(folders, path, body, says):
    async def main():
        async with running(folders["words"], []) as (proxy, client):
            cap = proxy.open("t.0")
            answer = await client.post(f"/s/{cap}/v1/{path}", json=body)
            assert answer.status_code == 400 and says in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert (answer.json().get("type") == "error") == (path == "messages")

    asyncio.run(main())
