"""The OpenHands SDK, unmodified, against the scripted engine: native tools, prompted tools, and a
condenser that rewrites its history.

Collected where it is installed (Python 3.12 or later): `nox --session openhands`.
"""

import json

import pytest
from live import session
from openhands.sdk import LLM, Agent, Conversation, LLMSummarizingCondenser, Tool
from openhands.tools.file_editor import FileEditorTool
from pydantic import SecretStr

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]


def use(name: str, **arguments: str) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def work(folder: str, steps: int) -> list[str]:
    """Create a file, look at it again and again, finish."""
    path = f"{folder}/a.txt"
    first = use("file_editor", command="create", path=path, file_text="left é 日本\n")
    look = use("file_editor", command="view", path=path)
    return [
        first,
        *(f"I look again, {n}.\n{look}" for n in range(steps)),
        use("finish", message="ok"),
    ]


def converse(url: str, folder: str, condense: int = 0, **model) -> Conversation:
    llm = LLM(usage_id="agent", model="openai/policy", base_url=url, api_key=SecretStr("x"),
              num_retries=0, **model)  # fmt: skip
    condenser = (
        LLMSummarizingCondenser(
            llm=llm.model_copy(update={"usage_id": "condenser"}), max_size=condense, keep_first=2
        )
        if condense
        else None
    )
    agent = Agent(llm=llm, tools=[Tool(name=FileEditorTool.name)], condenser=condenser)
    conversation = Conversation(agent, workspace=folder, visualizer=None, stuck_detection=False)
    conversation.send_message("Make the file.")
    conversation.run()
    assert conversation.state.execution_status.value == "finished"
    return conversation


def test_native_tools(folder, tmp_path):
    with session(folder, work(str(tmp_path), 3), "openhands") as (live, cap, url):
        converse(url, str(tmp_path))
        assert (tmp_path / "a.txt").read_text() == "left é 日本\n"
        facts = live.facts(cap)
    assert facts == {"calls": 5, "ids": "4/5", "forks": "none", "rows": 1, "exact": "5/5",
                     "masked": {}}  # fmt: skip


def test_condenser(folder, tmp_path):
    """The summary is a call of its own, without tools; what follows it is a branch. Every token of
    every row is what the engine saw and sampled.
    """

    def script(session, ids, how):
        if '"tools"' not in live.requests_text()[-1]:
            return "Summary: the file is there."
        steps = work(str(tmp_path), 40)
        n = len(live.engine.log)
        return steps[n] if n < 14 else steps[-1]

    with session(folder, script, "openhands") as (live, cap, url):
        converse(url, str(tmp_path), condense=12)
        facts = live.facts(cap)
    done, summaries = facts["calls"], sum('"tools"' not in r for r in live.requests_text())
    assert summaries >= 1 and facts["masked"] == {}
    assert facts["exact"] == f"{done}/{done}"
    assert facts["rows"] <= 1 + 2 * summaries


def typed(name: str, say: str = "", **arguments: str) -> str:
    """A call as OpenHands' own prompt asks for it, to a model without a syntax for calls."""
    given = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in arguments.items())
    return f"{say}<function={name}>\n{given}</function>"


def test_tools_in_the_prompt(folder, tmp_path):
    """Calls are text: OpenHands stops them at `</function`, parses them, and writes them again in
    its own way. Nothing tells that from an edit, so every reply begins a row, and each is exact.
    """
    path = f"{tmp_path}/a.txt"
    scripts = [
        typed("file_editor", command="create", path=path, file_text="left é 日本"),
        typed("file_editor", say="I look.\n", command="view", path=path),
        typed("file_editor", command="view", path=path),
        typed("finish", message="ok"),
    ]
    with session(folder, scripts, "openhands") as (live, cap, url):
        converse(url, str(tmp_path), native_tool_calling=False)
        assert (tmp_path / "a.txt").read_text().strip() == "left é 日本"
        facts = live.facts(cap)
    assert facts == {"calls": 4, "ids": "0/0", "forks": "assistant_edited 3", "rows": 4,
                     "exact": "4/4", "masked": {}}  # fmt: skip
