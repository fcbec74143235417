"""run_trial on real nano tasks: oracle, nop, nano against a scripted model, and cheats."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fake_model import FakeModel, Reply, _encode, _head, call, fake_model

from nanoswe_evalkit.agents.base import Agent, Job, ModelConfig, NopAgent, OracleAgent
from nanoswe_evalkit.agents.nano import SYSTEM_PROMPT, TOOLS, NanoAgent
from nanoswe_evalkit.outcome import Outcome, Stop, reward_of
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.trial import Trial, from_record, run_trial, seed_of, to_line
from nanoswe_harbor.grader.policy import sections
from nanoswe_harbor.task import Task

MODEL = ModelConfig(
    "tiny", temperature=0.5, max_tokens=77, seed=3, sampling={"top_p": 0.9, "top_k": 20}
)


class BashAgent:
    """Runs one script, then is done (or hangs, for the timeout)."""

    def __init__(self, script: str) -> None:
        self.script = script

    async def run(self, job: Job) -> Stop:
        await job.sandbox.run(["bash", "-c", self.script])
        return Stop.FINISHED

    async def close(self) -> None: ...


def _trial(
    sandboxes: SandboxFactory, task: Task, agent: Agent, url: str = "", empty: bool = False
) -> Trial:
    return asyncio.run(
        run_trial(
            task,
            0,
            trial_id=f"{task.task_id}.0",
            agent=agent,
            sandboxes=sandboxes,
            base_url=url,
            model=MODEL,
            grade_empty=empty,
        )
    )


def _nano(
    sandboxes: SandboxFactory, task: Task, replies: Sequence[Reply], turns: int = 5
) -> tuple[Trial, FakeModel]:
    async def main() -> tuple[Trial, FakeModel]:
        agent = NanoAgent(turns)
        async with fake_model(replies) as model:
            trial = await run_trial(
                task,
                0,
                trial_id="x.0",
                agent=agent,
                sandboxes=sandboxes,
                base_url=model.base_url,
                model=MODEL,
            )
            await agent.close()
        return trial, model

    return asyncio.run(main())


def _gold(task: Task) -> str:
    return (task.path / "solution" / "gold.patch").read_text()


def _fix(task: Task) -> str:
    """A sed command that does what the gold patch does."""
    (path, section), *_ = sections(_gold(task))
    old = next(x[1:] for x in section.splitlines() if x.startswith("-") and x[:3] != "---")
    new = next(x[1:] for x in section.splitlines() if x.startswith("+") and x[:3] != "+++")
    lines = section.splitlines()
    header = next(x for x in lines if x.startswith("@@"))
    before = lines[lines.index(header) + 1 : lines.index(f"-{old}")]
    number = int(header.split()[1].split(",")[0][1:]) + len(before)
    return f"sed -i '{number}s|.*|{new}|' {path}"


def test_oracle_resolves(sandboxes: SandboxFactory, tasks: list[Task]) -> None:
    for task in tasks:
        trial = _trial(sandboxes, task, OracleAgent())
        assert (trial.stop, trial.outcome, trial.reward) == (Stop.FINISHED, Outcome.RESOLVED, 1.0)
        assert trial.report is not None and trial.report["resolved"] and not trial.error
        assert [path for path, _ in sections(trial.patch)] == [p for p, _ in sections(_gold(task))]


def test_what_comes_before_the_tests_has_a_clock_of_its_own(
    sandboxes: SandboxFactory, task: Task, tmp_path: Path
) -> None:
    slow = tmp_path / task.task_id
    shutil.copytree(task.path, slow)
    script = slow / "tests" / "run_eval.sh"
    script.write_text(script.read_text().replace("unset NANOSWE_NONCE\n", "sleep 0.5\n"))
    trial = _trial(sandboxes, replace(task, path=slow), OracleAgent())
    clocks = trial.timings
    assert trial.outcome is Outcome.RESOLVED and clocks["install_sec"] >= 0.5
    assert 0 < clocks["tests_sec"] <= clocks["grade_sec"] - clocks["install_sec"]
    quick = _trial(sandboxes, task, OracleAgent()).timings
    assert 0 < quick["install_sec"] < clocks["install_sec"]


def test_nop_has_no_patch_and_fails_the_tests(sandboxes: SandboxFactory, task: Task) -> None:
    trial = _trial(sandboxes, task, NopAgent())
    assert (trial.outcome, trial.reward, trial.report) == (Outcome.NO_PATCH, 0.0, None)
    trial = _trial(sandboxes, task, NopAgent(), empty=True)
    assert (trial.outcome, trial.reward) == (Outcome.UNRESOLVED, 0.0)


def test_nano_agent_fixes_a_bug(sandboxes: SandboxFactory, task: Task) -> None:
    path = sections(_gold(task))[0][0]
    replies = [call(f"cat {path}"), call("false"), call(_fix(task)), call("submit")]
    trial, model = _nano(sandboxes, task, replies)
    assert (trial.stop, trial.outcome, trial.turns) == (Stop.FINISHED, Outcome.RESOLVED, 4)
    assert 0 < trial.timings["model_sec"] < trial.timings["agent_sec"]
    first = model.requests[0]
    assert first["messages"] == [
        {"role": "system", "content": "You fix one bug. Use bash. Say submit when done."},
        {"role": "user", "content": task.instruction},
    ]
    assert first["messages"][0]["content"] == SYSTEM_PROMPT and first["tools"] == TOOLS
    sampling = {key: first[key] for key in ("model", "temperature", "max_tokens", "seed")}
    seed = seed_of(3, "x.0")
    assert sampling == {"model": "tiny", "temperature": 0.5, "max_tokens": 77, "seed": seed}
    assert (first["top_p"], first["top_k"]) == (0.9, 20)
    contents = [m["content"] for m in model.requests[3]["messages"] if m["role"] == "tool"]
    assert contents[0].startswith("def ") and contents[1:] == [
        "(no output)\n[exit 1]",
        "(no output)",
    ]
    # Every request begins with the messages of the one before it, as they were.
    for before, after in zip(model.requests, model.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]


@pytest.mark.parametrize(
    ("replies", "stop"),
    [
        (["I am done."], Stop.PLAIN_TEXT),
        ([call("true")] * 2, Stop.MAX_TURNS),
        ([(400, '{"error": {"code": "context_length_exceeded"}}')], Stop.CONTEXT),
        # What the model writes is never the service's failure: it is told, and goes on.
        (
            [
                call("x", name="rm"),
                {"tool_calls": [{"id": "a", "function": {}}, {"function": None}, "x", None, {}]},
                {"tool_calls": [{"id": "a", "function": {"name": "bash", "arguments": None}}]},
                {"tool_calls": [{"id": "a", "function": {"name": "bash", "arguments": "[]"}}]},
                {
                    "tool_calls": [
                        {"id": "a", "function": {"name": "bash", "arguments": "[" * 9999}}
                    ]
                },
                call("echo \0"),
                call("echo \ud800"),
                call("x" * 200_000),
                "half a character: \ud800",
            ],
            Stop.PLAIN_TEXT,
        ),
    ],
)
def test_how_the_nano_agent_stops(
    sandboxes: SandboxFactory, task: Task, replies: list[Reply], stop: Stop
) -> None:
    trial, _ = _nano(sandboxes, task, replies, turns=len(replies))
    assert (trial.stop, trial.outcome, trial.reward) == (stop, Outcome.NO_PATCH, 0.0), trial.error
    assert from_record(json.loads(to_line(trial))) == trial


@pytest.mark.parametrize(
    "reply",
    [(500, "boom"), (200, "{}"), (401, "no key in this context"), (200, "<html>"), (200, "[]"),
     (400, "Invalid API key context"), {"tool_calls": {"id": "a"}}, (200, '{"choices": [[]]}')],
)  # fmt: skip
def test_a_failing_model_is_our_fault(sandboxes: SandboxFactory, task: Task, reply: Reply) -> None:
    trial, _ = _nano(sandboxes, task, [reply])
    assert (trial.stop, trial.outcome, trial.reward) == (None, Outcome.INFRA_ERROR, None)
    assert trial.error.startswith("model at http://")


def test_no_model_at_all_is_our_fault(sandboxes: SandboxFactory, task: Task) -> None:
    trial = _trial(sandboxes, task, NanoAgent(3), "http://127.0.0.1:9/v1")
    assert trial.outcome is Outcome.INFRA_ERROR and "ConnectError" in trial.error


def test_timeout_still_grades_what_was_done(sandboxes: SandboxFactory, task: Task) -> None:
    hurried = replace(task, agent_timeout_sec=1.0)
    trial = _trial(sandboxes, hurried, BashAgent(f"{_fix(task)}; sleep 60"))
    assert (trial.stop, trial.outcome) == (Stop.TIMEOUT, Outcome.RESOLVED)


class DrippingModel(FakeModel):
    """Answers each request at once but the last, to which it says a space every 0.1 s."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            (size,) = (int(x.split(":")[1]) for x in head if x.startswith("content-length"))
            self.requests.append(json.loads(await reader.readexactly(size)))
            if len(self.requests) > len(self.replies):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n")
                with suppress(ConnectionError):
                    while not writer.is_closing():
                        writer.write(b" ")
                        await asyncio.sleep(0.1)
                        await writer.drain()
                break
            _, body = _encode(self.replies[len(self.requests) - 1])
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()


def _dripping(
    sandboxes: SandboxFactory, task: Task, replies: list[Reply], timeout_sec: float = 600
) -> Trial:
    async def main() -> Trial:
        model, agent = DrippingModel(replies), NanoAgent(9)
        server = await asyncio.start_server(model.accept, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        trial = await run_trial(
            task, 0, trial_id="x.0", agent=agent, sandboxes=sandboxes, base_url=url,
            model=replace(MODEL, timeout_sec=timeout_sec),
        )  # fmt: skip
        await agent.close()
        server.close()
        await asyncio.gather(*model.connections)
        return trial

    return asyncio.run(main())


def test_an_engine_that_hangs_is_our_fault(sandboxes: SandboxFactory, task: Task) -> None:
    """With a recipe's 600 s for a call, and a task's 120 s for the agent, that scored 0."""
    hurried = replace(task, agent_timeout_sec=1.5)
    trial = _dripping(sandboxes, hurried, [call("touch x")])
    assert (trial.stop, trial.outcome, trial.reward) == (None, Outcome.INFRA_ERROR, None)
    assert "no answer for 1." in trial.error and trial.agent["unanswered_sec"] > 0.8
    assert "+++ b/x" in trial.patch or "b/x" in trial.patch  # what it had done stays on record


def test_an_agent_out_of_time_is_not_the_engines_fault(
    sandboxes: SandboxFactory, task: Task
) -> None:
    """A call is unanswered, but not for long: commands have taken the time."""
    hurried = replace(task, agent_timeout_sec=5.0)
    trial = _dripping(sandboxes, hurried, [call("sleep 1.4"), call("sleep 1.4")])
    assert (trial.stop, trial.outcome) == (Stop.TIMEOUT, Outcome.NO_PATCH)
    assert trial.agent.get("unanswered_sec", 0) < 2.5


def test_the_clock_of_a_call_does_not_begin_anew_at_each_byte(
    sandboxes: SandboxFactory, task: Task
) -> None:
    trial = _dripping(sandboxes, task, [], timeout_sec=0.5)
    assert trial.outcome is Outcome.INFRA_ERROR and "TimeoutError" in trial.error
    assert 0.5 <= trial.timings["model_sec"] < 5


def test_code_under_test_may_ask_git(sandboxes: SandboxFactory, task: Task) -> None:
    """As builds do for their version; the checkout is not of the sandbox's uid."""
    asks = 'import subprocess; subprocess.run(["git", "rev-parse", "HEAD"], check=True)'
    path = sections(_gold(task))[0][0]
    trial = _trial(sandboxes, task, BashAgent(f"{_fix(task)}; echo '{asks}' >> {path}"))
    assert trial.outcome is Outcome.RESOLVED, trial.report


def test_wrong_fix_is_unresolved(sandboxes: SandboxFactory, task: Task) -> None:
    path = sections(_gold(task))[0][0]
    trial = _trial(sandboxes, task, BashAgent(f"echo 'x = 1' >> {path}"))
    assert (trial.outcome, trial.reward) == (Outcome.UNRESOLVED, 0.0)


@pytest.mark.parametrize("path", ["conftest.py", "a.pth", "TEST"])
def test_touching_the_tests_without_effect_costs_nothing(
    sandboxes: SandboxFactory, task: Task, path: str
) -> None:
    path = task.test_files[0] if path == "TEST" else path
    trial = _trial(sandboxes, task, BashAgent(f"{_fix(task)}; echo '#' >> {path}"))
    assert (trial.outcome, trial.reward) == (Outcome.RESOLVED, 1.0)
    assert trial.report is not None and trial.report["dropped"] == [path]
    assert trial.report["raw_outcome"] == "resolved"


BLIND = "import unittest; unittest.TestCase.assertEqual = lambda *a: None"
TO_INTS = BLIND.replace("*a: None", "self, a, b: type(a) is list and self.assertListEqual(a, b)")


@pytest.mark.parametrize(
    ("path", "text", "fixed", "raw"),
    [
        ("tests/__init__.py", TO_INTS, False, "resolved"),
        ("tests/__init__.py", "1/0", True, "unresolved"),
        ("argparse/__init__.py", "1/0", True, "resolved"),  # it is loaded before
        ("tests/conftest.py", "1/0", True, "resolved"),  # unittest does not read it
        ("traceback.py", "1/0", False, "unresolved"),
    ],
)
def test_two_verdicts_that_differ_are_tamper(
    sandboxes: SandboxFactory, task: Task, path: str, text: str, fixed: bool, raw: str
) -> None:
    """The whole patch is run too: what it gains, or breaks, by its test infrastructure shows."""
    fix = _fix(task) if fixed else "true"
    trial = _trial(
        sandboxes, task, BashAgent(f"{fix}; mkdir -p $(dirname {path}); echo '{text}' > {path}")
    )
    assert trial.report is not None and trial.report["dropped"] == [path]
    assert trial.report["raw_outcome"] == raw
    assert trial.report["resolved"] is fixed  # what the policed patch is worth stays on record
    same = fixed is (raw == "resolved")
    assert (trial.outcome is Outcome.TAMPER) is not same
    assert trial.reward == float(fixed and same)


def test_a_runner_that_no_test_can_fail_is_tamper(sandboxes: SandboxFactory, task: Task) -> None:
    path = sections(_gold(task))[0][0]
    blind = f"{BLIND}; unittest.TestCase.fail = unittest.TestCase.assertEqual"
    trial = _trial(sandboxes, task, BashAgent(f"echo '{blind}' >> {path}"))
    assert (trial.outcome, trial.reward) == (Outcome.TAMPER, 0.0)
    assert trial.report is not None and "must fail" in trial.report["reason"]


def test_commits_hooks_and_config_do_not_hide_the_patch(
    sandboxes: SandboxFactory, task: Task
) -> None:
    script = f"""{_fix(task)}
git commit -qam done; git config core.fsmonitor 'touch /testbed/evil; false'
git config diff.external 'echo forged'; git config core.hooksPath /testbed; touch .git/index.lock"""
    trial = _trial(sandboxes, task, BashAgent(script))
    assert trial.outcome is Outcome.RESOLVED and "evil" not in trial.patch


def test_without_its_repository_the_work_is_not_lost(sandboxes: SandboxFactory, task: Task) -> None:
    trial = _trial(sandboxes, task, BashAgent("rm -rf .git"))
    assert trial.outcome is Outcome.NO_PATCH
    trial = _trial(sandboxes, task, BashAgent(f"{_fix(task)}; rm -rf .git; echo > .git"))
    assert trial.outcome is Outcome.RESOLVED and trial.patch.count("diff --git") == 1


def test_too_large_a_patch_is_rejected(sandboxes: SandboxFactory, task: Task) -> None:
    trial = _trial(
        sandboxes, task, BashAgent("for n in 1 2 3; do head -c 3000000 /dev/urandom > $n; done")
    )
    assert (trial.outcome, trial.reward) == (Outcome.PATCH_REJECTED, 0.0)
    assert "larger than" in trial.error


def test_any_bytes_survive_extraction_and_record(sandboxes: SandboxFactory, task: Task) -> None:
    script = rf"""{_fix(task)}; printf 'caf\351 no newline' > 'a b "q" ä.txt'
head -c 4000 /dev/urandom > data.bin; printf 'x\r\n' > crlf; ln -s crlf link; chmod +x README.md"""
    trial = _trial(sandboxes, task, BashAgent(script))
    assert trial.outcome is Outcome.RESOLVED
    assert from_record(json.loads(to_line(trial))) == trial


def test_a_test_run_that_forges_markers_does_not_pass(
    sandboxes: SandboxFactory, task: Task
) -> None:
    path = sections(_gold(task))[0][0]
    name = task.fail_to_pass[0].split(" ")[0]
    forged = f'print(">>>>> Start Test Output 1\\n{name} ... ok\\n>>>>> End Test Output 1 0")'
    trial = _trial(sandboxes, task, BashAgent(f"echo '{forged}' >> {path}"))
    assert trial.outcome is Outcome.UNRESOLVED


def test_a_broken_grader_has_no_reward(
    sandboxes: SandboxFactory, task: Task, tmp_path: Path
) -> None:
    broken = tmp_path / task.task_id
    shutil.copytree(task.path, broken)
    (broken / "tests" / "run_eval.sh").write_text("exit 0\n")
    trial = _trial(sandboxes, replace(task, path=broken), OracleAgent())
    assert (trial.outcome, trial.reward) == (Outcome.GRADER_ERROR, None)


def test_rewards() -> None:
    no_reward = {o for o in Outcome if reward_of(o) is None}
    assert no_reward == {Outcome.INFRA_ERROR, Outcome.GRADER_ERROR}
    assert [o for o in Outcome if reward_of(o) == 1.0] == [Outcome.RESOLVED]
