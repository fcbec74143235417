"""Real clients, unmodified, against the scripted engine: openai, litellm, mini-swe-agent.

For each: do the ids that the proxy mints come back, does anything fork, is every row what the
engine logged. Collected where they are installed: `nox --session clients`.
"""

import json

import litellm
import openai
import pytest
from live import call, session
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

# what these libraries warn about among themselves is not ours to fail on
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}
START = [{"role": "system", "content": "Fix."}, {"role": "user", "content": "go"}]
WANTED = {"forks": "none", "rows": 1, "masked": {}}
# two calls, one with text before it, two at once, one whose arguments are not plain ASCII, the end
SCRIPTS = [
    call("cat left"),
    f"I look.\n{call('ls é')}",
    f"{call('left')}\n{call('right')}",
    call("echo 日本 🙂"),
    "It is done.",
]


def check(facts: dict, calls: int, ids: str, **other) -> None:
    wanted = {"calls": calls, "ids": ids, "exact": f"{calls}/{calls}"}
    assert facts == WANTED | wanted | other


def results(calls) -> list[dict]:
    return [{"role": "tool", "tool_call_id": c.id, "content": f"{c.function.arguments}\n"}
            for c in calls]  # fmt: skip


def test_openai(folder):
    with session(folder, SCRIPTS, "openai") as (live, cap, url):
        with openai.OpenAI(base_url=url, api_key="x") as client:
            messages: list = list(START)
            while True:
                answer = client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL], temperature=0.3
                )
                message = answer.choices[0].message
                messages.append(message)  # the object itself, as the library's own examples do
                if not message.tool_calls:
                    break
                messages += results(message.tool_calls)
            assert message.content == "It is done." and answer.usage.completion_tokens > 1
            assert [m.id for m in client.models.list()] == ["policy"]
        check(live.facts(cap), 5, "5/5")


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


def test_litellm(folder):
    with session(folder, SCRIPTS, "litellm") as (live, cap, url):
        messages: list = list(START)
        while True:
            answer = litellm.completion(
                model="openai/policy", api_base=url, api_key="x", messages=messages, tools=[TOOL]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump())  # with every null that litellm adds
            if not message.tool_calls:
                break
            messages += results(message.tool_calls)
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
