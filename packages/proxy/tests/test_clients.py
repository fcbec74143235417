"""Real Python clients, unmodified, against the scripted engine: openai (Chat Completions and
Responses), anthropic, litellm, each streamed and not, and mini-swe-agent.

For each: do the ids that the proxy mints come back, does anything fork, is every row what the
engine logged. Collected where they are installed: `nox --session clients`.
"""

import json

import anthropic
import families
import litellm
import openai
import pytest
from conftest import _bpe
from live import call, session
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

# what these libraries warn about among themselves is not ours to fail on
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
both = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}},
              "required": ["command"], "additionalProperties": False}  # fmt: skip
FUNCTION = {"name": "bash", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
SYSTEM = {"role": "system", "content": "Fix."}
START = [SYSTEM, {"role": "user", "content": "go"}]
# two calls, one with text before it, two at once, one whose arguments are not plain ASCII, the end
SCRIPTS = [
    call("cat left"),
    f"I look.\n{call('ls é')}",
    f"{call('left')}\n{call('right')}",
    call("echo 日本 🙂"),
    "It is done.",
]
# what each client must make of that: text and commands
SAID = [("", ["cat left"]), ("I look.", ["ls é"]), ("", ["left", "right"]),
        ("", ["echo 日本 🙂"]), ("It is done.", [])]  # fmt: skip


def check(facts: dict, calls: int, ids: str, **other) -> None:
    wanted = {"calls": calls, "ids": ids, "forks": "none", "rows": 1, "exact": f"{calls}/{calls}"}
    assert facts == wanted | {"masked": {}} | other


def commands(calls) -> list[str]:
    return [json.loads(c.function.arguments)["command"] for c in calls or ()]


def results(calls) -> list[dict]:
    return [{"role": "tool", "tool_call_id": c.id, "content": f"{c.function.arguments}\n"}
            for c in calls]  # fmt: skip


@both
def test_openai(folder, streamed):
    with session(folder, SCRIPTS, "openai") as (live, cap, url):
        with openai.OpenAI(base_url=url, api_key="x") as client:
            messages, said = list(START), []
            while True:
                asked = {"model": "policy", "messages": messages, "tools": [TOOL]}
                if streamed:
                    asked["stream_options"] = {"include_usage": True}
                    with client.chat.completions.stream(**asked) as stream:
                        answer = stream.get_final_completion()
                else:
                    answer = client.chat.completions.create(**asked)
                message = answer.choices[0].message
                assert answer.usage.completion_tokens == len(live.engine.log[-1].sampled)
                messages.append(message)  # the object itself, as the library's own examples do
                said.append((message.content or "", commands(message.tool_calls)))
                if not message.tool_calls:
                    break
                messages += results(message.tool_calls)
            assert [m.id for m in client.models.list()] == ["policy"]
        assert said == SAID
        check(live.facts(cap), 5, "5/5")


@both
def test_openai_responses(folder, streamed):
    """`store=False`: the whole input each time, items as they came."""
    with session(folder, SCRIPTS, "responses") as (live, cap, url):
        with openai.OpenAI(base_url=url, api_key="x") as client:
            items, said = [{"role": "user", "content": "go"}], []
            while True:
                asked = {"model": "policy", "instructions": "Fix.", "input": items, "store": False,
                         "tools": [{"type": "function", **FUNCTION}]}  # fmt: skip
                if streamed:
                    with client.responses.stream(**asked) as stream:
                        answer = stream.get_final_response()
                else:
                    answer = client.responses.create(**asked)
                assert answer.usage.output_tokens == len(live.engine.log[-1].sampled)
                calls = [item for item in answer.output if item.type == "function_call"]
                said.append(
                    (answer.output_text, [json.loads(c.arguments)["command"] for c in calls])
                )
                items += [item.model_dump(exclude={"parsed_arguments"}) for item in answer.output]
                if not calls:
                    break
                items += [{"type": "function_call_output", "call_id": c.call_id, "output": "ok"}
                          for c in calls]  # fmt: skip
        assert said == SAID
        facts = live.facts(cap)
        # an id per call and one per item; the last reply is never sent back
        check(facts, 5, "11/12")


@both
def test_anthropic(folder, streamed):
    with session(folder, SCRIPTS, "anthropic") as (live, cap, url):
        with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="x") as client:
            messages, said = [{"role": "user", "content": "go"}], []
            while True:
                asked = {"model": "policy", "system": "Fix.", "messages": messages,
                         "tools": [{"name": "bash", "input_schema": PARAMETERS}]}  # fmt: skip
                counted = client.messages.count_tokens(**asked).input_tokens
                message = ask_anthropic(client, streamed, asked)
                prompt = live.engine.log[-1].prompt
                assert counted == message.usage.input_tokens == len(prompt)
                assert message.usage.output_tokens == len(live.engine.log[-1].sampled)
                calls = [block for block in message.content if block.type == "tool_use"]
                text = "".join(block.text for block in message.content if block.type == "text")
                said.append((text, [c.input["command"] for c in calls]))
                assert message.stop_reason == ("tool_use" if calls else "end_turn")
                messages.append({"role": "assistant", "content": message.content})
                if not calls:
                    break
                # each result as a message of its own: the API allows it
                messages += [{"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": c.id, "content": f"{c.input}"}]}
                    for c in calls]  # fmt: skip
        assert said == SAID
        check(live.facts(cap), 5, "5/5")


def ask_anthropic(client, streamed: bool, asked: dict):
    if not streamed:
        return client.messages.create(max_tokens=4000, **asked)
    with client.messages.stream(max_tokens=4000, **asked) as stream:
        return stream.get_final_message()


@both
def test_thoughts_come_back_signed(tmp_path, streamed):
    """A thinking block and a reasoning item carry ids of ours; with them nothing forks, though
    what was thought is cut on the way.
    """
    folder = families.folder("qwen3", _bpe(), tmp_path / "qwen3")
    scripts = [f"<think>\nleft or right\n</think>\n\n{call('left')}",
               "<think>\nthat was it\n</think>\n\nIt is done."]  # fmt: skip
    with session(folder, scripts * 2, "thoughts") as (live, cap, url):
        with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="x") as client:
            messages = [{"role": "user", "content": "go"}]
            asked = {"model": "policy", "messages": messages,
                     "tools": [{"name": "bash", "input_schema": PARAMETERS}]}  # fmt: skip
            first = ask_anthropic(client, streamed, asked)
            thought, use = first.content
            assert thought.thinking.strip() == "left or right" and thought.signature
            thought.thinking = ""  # as clients that keep only the signature
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "ok"}
            messages += [{"role": "assistant", "content": first.content},
                         {"role": "user", "content": [result]}]  # fmt: skip
            thought, text = ask_anthropic(client, streamed, asked).content
            assert thought.thinking.strip() == "that was it" and text.text == "It is done."
        facts = live.facts(cap)
        assert facts["ids"] == "2/3"  # the last reply is never sent back
        check(facts, 2, "2/3")


def test_openai_errors_are_its_own(folder):
    with session(folder, SCRIPTS, "openai") as (_, _, url):
        huge = [{"role": "user", "content": "left right " * 60_000}]
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as raised:
                client.chat.completions.create(model="p", messages=huge)
            assert raised.value.code == "context_length_exceeded"
            client.base_url = url.replace("/s/", "/s/x")
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="p", messages=START)


def test_anthropic_errors_are_its_own(folder):
    with session(folder, SCRIPTS, "anthropic") as (_, _, url):
        root = url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=root, api_key="x", max_retries=0) as client:
            asked = {"model": "p", "max_tokens": 9}
            huge = [{"role": "user", "content": "left right " * 60_000}]
            with pytest.raises(anthropic.BadRequestError, match="too long|context"):
                client.messages.create(messages=huge, **asked)
            with pytest.raises(anthropic.BadRequestError, match="content must be text"):
                picture = {"type": "image", "source": {"type": "url", "url": "x"}}
                client.messages.create(messages=[{"role": "user", "content": [picture]}], **asked)
            client.base_url = root.replace("/s/", "/s/x")
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(messages=[{"role": "user", "content": "go"}], **asked)


def test_the_key_is_the_session_where_the_url_cannot_be(folder):
    """Bearer, x-api-key."""
    with session(folder, ["left", "right"], "key") as (live, cap, url):
        root = url.partition("/s/")[0]
        user = [{"role": "user", "content": "go"}]
        with openai.OpenAI(base_url=f"{root}/v1", api_key=cap) as client:
            client.chat.completions.create(model="p", messages=user)
        with anthropic.Anthropic(base_url=root, api_key=cap) as client:
            client.messages.create(model="p", messages=user, max_tokens=99)
        check(live.facts(cap), 2, "0/0", rows=2)


@both
def test_litellm(folder, streamed):
    with session(folder, SCRIPTS, "litellm") as (live, cap, url):
        messages, said = list(START), []
        while True:
            answer = litellm.completion(
                model="openai/policy", api_base=url, api_key="x", messages=messages, tools=[TOOL],
                stream=streamed,
            )  # fmt: skip
            if streamed:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message.model_dump())  # with every null that litellm adds
            said.append((message.content or "", commands(message.tool_calls)))
            if not message.tool_calls:
                break
            messages += results(message.tool_calls)
        assert said == SAID
        check(live.facts(cap), 5, "5/5")
        with pytest.raises(litellm.ContextWindowExceededError):
            other = live.proxy.base_url(live.open("other"))
            huge = [{"role": "user", "content": "left right " * 60_000}]
            litellm.completion(model="openai/p", api_base=other, api_key="x", messages=huge)


def test_mini_swe_agent(folder, tmp_path):
    """A real run with a real shell; once it says something that is no call, which it drops."""
    end = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"
    scripts = [call("echo left > a.txt"), "I forgot the call.", call("cat a.txt"), call(end)]
    with session(folder, scripts, "mini") as (live, cap, url):
        model = LitellmModel(
            model_name="openai/policy",
            model_kwargs={"api_base": url, "api_key": "x"},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=str(tmp_path)),
            system_template="Use bash.",
            instance_template="{{task}}",
        )
        assert agent.run("go")["exit_status"] == "Submitted"
        assert (tmp_path / "a.txt").read_text() == "left\n"
        observed = [json.dumps(m) for m in agent.messages if m.get("role") == "tool"]
        assert "left" in observed[1]
        # the reply that was dropped is a leaf of its own, trained like the rest
        check(live.facts(cap), 4, "2/3", rows=2, forks="reply_dropped 1")


@both
def test_openai_completions(folder, streamed):
    """The legacy API: prompts as text and as ids, several replies, logprobs of what was sampled."""
    scripts = ["left", "right é", "sum", "of"]
    with session(folder, scripts, "completions") as (live, cap, url):
        with openai.OpenAI(base_url=url, api_key="x") as client:
            ids = live.proxy.renderer.codec.full.encode("the fox", add_special_tokens=False).ids
            texts = {}
            for prompt in ("the <|im_end|> fox", ids, [ids, [70, 71]]):
                answer = client.completions.create(
                    model="policy", prompt=prompt, max_tokens=90, logprobs=0, stream=streamed
                )
                for choice in (c for a in (answer if streamed else [answer]) for c in a.choices):
                    key = (str(prompt), choice.index)
                    texts[key] = texts.get(key, "") + choice.text
                    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
            with pytest.raises(openai.BadRequestError, match="logprobs must be 0"):
                client.completions.create(model="p", prompt="a", logprobs=5)
        assert sorted(texts.values()) == sorted(scripts)
        check(live.facts(cap), 4, "0/0", rows=4)


@both
def test_openai_choices(folder, streamed):
    """n = 3: each choice with ids of its own, and the agent goes on from the second."""
    scripts = [call("cat left"), call("cat right"), "of", "It is done."]
    with session(folder, scripts, "choices") as (live, cap, url):
        with openai.OpenAI(base_url=url, api_key="x") as client:
            asked = {"model": "policy", "messages": START, "tools": [TOOL], "n": 3}
            if streamed:
                with client.chat.completions.stream(**asked) as stream:
                    answer = stream.get_final_completion()
            else:
                answer = client.chat.completions.create(**asked)
            messages = [choice.message for choice in answer.choices]
            said = [(m.content or "", commands(m.tool_calls)) for m in messages]
            assert said == [("", ["cat left"]), ("", ["cat right"]), ("of", [])]
            chosen = [*START, messages[1], *results(messages[1].tool_calls)]
            client.chat.completions.create(model="policy", messages=chosen, tools=[TOOL])
        check(live.facts(cap), 4, "1/2", rows=3)
