"""The demo's last resort: what it runs, and that it runs nothing else."""

import asyncio
from pathlib import Path

import pytest

from nanoswe_evalkit.agents.base import ModelConfig, OracleAgent
from nanoswe_evalkit.grading import EVALUATE
from nanoswe_evalkit.outcome import Outcome
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import ExecResult, Limits
from nanoswe_evalkit.trial import run_trial
from nanoswe_harbor.task import Task


@pytest.fixture
def allowlist(nano: Path, tmp_path: Path) -> SandboxFactory:
    return SandboxFactory("allowlist", tmp_path / "work", nano / "mirror", Limits())


def _bash(factory: SandboxFactory, task: Task, *commands: str) -> list[ExecResult]:
    async def main() -> list[ExecResult]:
        async with factory.open(task) as sandbox:
            return [await sandbox.run(["bash", "-c", command]) for command in commands]

    return asyncio.run(main())


def test_what_runs(allowlist: SandboxFactory, task: Task) -> None:
    results = _bash(
        allowlist,
        task,
        "sed -i 's|^# .*|# a (b) \\& c; d|' README.md",
        "cat README.md",
        "head -n 1 /testbed/README.md",
        "grep -n 'unittest' README.md",
        "ls",
        "sed -n '1p' README.md",
    )
    assert [result.exit_code for result in results] == [0] * 6
    assert results[2].stdout == results[5].stdout == b"# a (b) & c; d\n"


@pytest.mark.parametrize(
    "command",
    [
        *("id", "python3 -c 1", "bash -c id", "git status", "", "cat", "cat /etc/passwd"),
        *("cat ../x", "cat README.md; id", "cat README.md | sh", "cat < /etc/passwd", "ls /"),
        *("cat README.md && id", "cat .git/config", "grep -f /etc/passwd README.md"),
        *("grep -r x /etc", "sed -f x README.md", "sed --expression=e README.md", "ls $(id)"),
        *("cat 'unclosed", EVALUATE),
    ],
)
def test_what_is_refused(allowlist: SandboxFactory, task: Task, command: str) -> None:
    (result,) = _bash(allowlist, task, command)
    assert result.exit_code == 126 and result.stdout.startswith(b"not allowed here: ")


@pytest.mark.parametrize(
    "script", ["1e id", "1w /tmp/x", "1r /etc/passwd", "s/.*/id/e", "s/a/b/w x"]
)
def test_sed_runs_and_reads_nothing_else(
    allowlist: SandboxFactory, task: Task, script: str
) -> None:
    (result,) = _bash(allowlist, task, f"sed -n '{script}' README.md")
    assert result.exit_code and b"sandbox" in result.stdout


def test_a_link_out_is_refused(allowlist: SandboxFactory, task: Task) -> None:
    async def main() -> ExecResult:
        async with allowlist.open(task) as sandbox:
            (sandbox.scratch / "tree" / "out").symlink_to("/etc/passwd")  # type: ignore[attr-defined]
            return await sandbox.run(["bash", "-c", "cat out"])

    assert asyncio.run(main()).exit_code == 126


def test_a_trial_is_graded(allowlist: SandboxFactory, task: Task) -> None:
    trial = asyncio.run(
        run_trial(
            task,
            0,
            trial_id="x.0",
            agent=OracleAgent(),
            sandboxes=allowlist,
            base_url="",
            model=ModelConfig("m"),
        )
    )
    assert trial.outcome is Outcome.RESOLVED
