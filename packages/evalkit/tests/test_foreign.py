"""Harbor tasks that upstream's `harbor init` made: read, run and judged, through real Docker."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from nanoswe_evalkit.agents.base import Agent, ModelConfig, NopAgent, OracleAgent
from nanoswe_evalkit.outcome import Outcome
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import load_task

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[3]
BASE = "FROM debian:bookworm-slim\nWORKDIR /app\n"
TEST = """\
#!/bin/bash
[ "$(cat hello.txt)" = hello ] && [ ! -e /only-where-the-agent-was ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module", params=["shared", "separate"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `harbor init` leaves it, then filled in as its comments say."""
    out = tmp_path_factory.mktemp("foreign")
    env = {**os.environ, "HARBOR_TELEMETRY": "0", "PYTHONWARNINGS": ""}
    cli = ROOT / ".nox/harbor-cli"
    subprocess.run([ROOT / "tools/harbor", cli], check=True)
    options = ("--task", "--no-pytest", "--verifier-mode", request.param, "--output-dir", str(out))
    command = [cli / "bin/harbor", "init", "someone/hello", *options]
    subprocess.run(command, check=True, env=env, capture_output=True)
    task = out / "hello"
    (task / "instruction.md").write_text("Write hello into hello.txt.\n")
    (task / "environment/Dockerfile").write_text(BASE)
    (task / "tests/test.sh").write_text(TEST)
    solve = "#!/bin/bash\necho hello > hello.txt\n"
    if (tests := task / "tests/Dockerfile").is_file():
        assert request.param == "separate"
        tests.write_text(f"{BASE}COPY . /tests/\n")
        config = (task / "task.toml").read_text()
        assert "artifacts = []" in config
        config = config.replace("artifacts = []", 'artifacts = ["/app/hello.txt"]')
        (task / "task.toml").write_text(config)
        solve += "touch /only-where-the-agent-was\n"
    (task / "solution/solve.sh").write_text(solve)
    return task


def run(folder: Path, work: Path, agent: Agent) -> Trial:
    task = load_task(folder)
    assert (task.base_commit, task.name) == ("", "someone/hello")
    sandboxes = SandboxFactory("docker", work, None, Limits(timeout_sec=120))
    running = run_trial(
        *(task, 0),
        trial_id="hello.0",
        agent=agent,
        sandboxes=sandboxes,
        base_url="",
        model=ModelConfig("none"),
    )
    return asyncio.run(running)


@pytest.mark.parametrize(
    ("agent", "outcome", "reward"),
    [(OracleAgent(), Outcome.RESOLVED, 1.0), (NopAgent(), Outcome.UNRESOLVED, 0.0)],
)
def test_it_runs(
    folder: Path, tmp_path: Path, agent: Agent, outcome: Outcome, reward: float
) -> None:
    trial = run(folder, tmp_path / "work", agent)
    assert (trial.outcome, trial.reward, trial.error) == (outcome, reward, ""), trial.report


@pytest.mark.parametrize("text", ["echo nothing", "echo nan > /logs/verifier/reward.txt"])
def test_no_reward_is_the_graders_fault(folder: Path, tmp_path: Path, text: str) -> None:
    (folder / "tests/test.sh").write_text(f"#!/bin/bash\n{text}\n")
    trial = run(folder, tmp_path / "work", OracleAgent())
    assert (trial.outcome, trial.reward) == (Outcome.GRADER_ERROR, None)
    assert trial.report is not None and "left no reward" in trial.report["reason"]
