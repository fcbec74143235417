"""Command-line agents from npm, unmodified and offline: Claude Code (Messages) and Codex
(Responses) mend a small bug through the proxy, with their own prompts, tools and shells.

Collected where `claude` and `codex` are found: `nox --session clients`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import _bpe
from live import Live

from nanoswe_proxy.engine.scripted import Script

pytestmark = pytest.mark.interop
BROKEN = "def total(a, b):\n    return a - b\n"
MENDED = BROKEN.replace("-", "+")
CHECK = f"{sys.executable} -c 'import stock; print(stock.total(1, 2))'"
CONFIG = """
model = "policy"
model_provider = "nano"
check_for_update_on_startup = false
analytics.enabled = false
[model_providers.nano]
name = "nano"
base_url = "%s"
wire_api = "responses"
env_key = "NANO_KEY"
"""


@pytest.fixture
def home(tmp_path) -> Path:
    """A home, and beside it a folder with the bug, and one with a model."""
    for name in ("home", "work", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "work/stock.py").write_text(BROKEN)
    _bpe().save(str(tmp_path / "model/tokenizer.json"))
    return tmp_path / "home"


def use(*calls: tuple[str, dict], say: str = "") -> str:
    """A reply that calls tools."""
    said = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return say + "\n".join(f"<tool_call>\n{s}\n</tool_call>" for s in said)


def run(home: Path, scripts, command: list, **env: str) -> tuple[str, dict, list[dict]]:
    """What it said at last, the facts of its session, and what it asked. Whatever it looks for in
    the network is not there.
    """
    with Live(home.parent / "model", scripts, max_context=1_000_000) as live:
        cap = live.open(command[0])
        url = live.proxy.base_url(cap)
        (home / "config.toml").write_text(CONFIG % url)
        nowhere = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
        facts = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1",
                 "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), **nowhere}  # fmt: skip
        done = subprocess.run(
            command, cwd=home.parent / "work", capture_output=True, text=True, timeout=240,
            stdin=subprocess.DEVNULL, env=facts | env,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout, live.facts(cap), [json.loads(r) for r in live.requests_text()]


def claude(home: Path, scripts) -> tuple[dict, dict, list[dict]]:
    off = ("AUTOUPDATER", "TELEMETRY", "ERROR_REPORTING")
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}
    quiet |= {f"DISABLE_{name}": "1" for name in off}
    said, *rest = run(
        home, scripts,
        ["claude", "--print", "total() in stock.py is wrong. Mend it.", "--model", "policy",
         "--dangerously-skip-permissions", "--output-format", "json"],
        ANTHROPIC_API_KEY="x", **quiet,
    )  # fmt: skip
    return json.loads(said), *rest


def codex(home: Path, scripts) -> tuple[list[dict], dict, list[dict]]:
    said, *rest = run(
        home, scripts,
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
         "--json", "total() in stock.py is wrong. Mend it."],
        CODEX_HOME=str(home), NANO_KEY="x",
    )  # fmt: skip
    return [json.loads(line) for line in said.splitlines()], *rest


def test_claude_code_mends_a_bug(home):
    """It reads, edits, runs two commands at once; once the engine fails and it asks again."""
    path = str(home.parent / "work/stock.py")
    edit = {"file_path": path, "old_string": "a - b", "new_string": "a + b"}
    check = {"command": CHECK, "description": "Runs it"}
    scripts = [
        use(("Read", {"file_path": path}), say="I look. é 🙂\n"),
        Script("I thi", fail_after=3),
        use(("Edit", edit)),
        use(("Bash", check), ("Bash", {"command": "cat stock.py", "description": "Shows it"})),
        "It is mended.",
    ]
    said, facts, asked = claude(home, scripts)
    assert said["result"] == "It is mended."
    assert Path(path).read_text() == MENDED
    outputs = {b["content"] for b in asked[-1]["messages"][-1]["content"]}
    assert {"3", MENDED.rstrip("\n")} <= outputs
    assert facts == {"calls": 5, "ids": "4/4", "forks": "none", "rows": 1, "exact": "4/5",
                     "masked": {"aborted": 3}}  # fmt: skip
    assert all(body["stream"] for body in asked) and len(asked[0]["tools"]) > 10


def test_claude_code_sends_a_sub_agent(home):
    """Two histories under one URL: a row each, nothing forked within either."""
    path = str(home.parent / "work/stock.py")
    task = {"description": "Find it", "prompt": "Where is total()?", "subagent_type": "Explore",
            "run_in_background": False}  # fmt: skip
    main = iter(
        [use(("Agent", task), say="I ask.\n"), use(("Read", {"file_path": path})), "Found."]
    )
    sub = iter([use(("Bash", {"command": "cat stock.py", "description": "Shows"})), "In stock.py."])
    decode = _bpe().decode

    def script(session, ids, how):
        return next(main if '"name": "Agent"' in decode(ids, skip_special_tokens=False) else sub)

    said, facts, asked = claude(home, script)
    assert said["result"] == "Found."
    assert any("In stock.py." in json.dumps(body["messages"][-1]) for body in asked)
    assert facts == {"calls": 5, "ids": "3/3", "forks": "system_changed 1", "rows": 2,
                     "exact": "5/5", "masked": {}}  # fmt: skip


def test_codex_mends_a_bug(home):
    scripts = [
        use(("exec_command", {"cmd": "cat stock.py"}), say="I look. é 🙂\n"),
        Script("I thi", fail_after=3),
        use(("exec_command", {"cmd": "sed -i 's/a - b/a + b/' stock.py"})),
        use(("exec_command", {"cmd": CHECK}), ("exec_command", {"cmd": "cat stock.py"})),
        "It is mended.",
    ]
    events, facts, asked = codex(home, scripts)
    said = [e["item"] for e in events if e["type"] == "item.completed"]
    assert said[-1] == {"id": said[-1]["id"], "type": "agent_message", "text": "It is mended."}
    ran = [i["aggregated_output"] for i in said if i["type"] == "command_execution"]
    assert ran[:2] == [BROKEN, ""] and sorted(ran[2:]) == ["3\n", MENDED]
    assert (home.parent / "work/stock.py").read_text() == MENDED
    assert facts == {"calls": 5, "ids": "9/10", "forks": "none", "rows": 1, "exact": "4/5",
                     "masked": {"aborted": 3}}  # fmt: skip
    assert all(body["stream"] and not body["store"] for body in asked)
