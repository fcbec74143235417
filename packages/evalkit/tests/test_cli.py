"""The commands as a user runs them: exit codes, one-line errors, JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def _evalkit(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_verify_names_the_liars(nano: Path, tmp_path: Path) -> None:
    copy = tmp_path / "nano"
    shutil.copytree(nano, copy)
    done = _evalkit(tmp_path, "verify", "nano/train", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"certified": 3, "liars": [], "lost": []}
    liar = copy / "train" / "nano__train-0001"
    gold = liar / "solution" / "gold.patch"
    other = (copy / "train" / "nano__train-0000" / "solution" / "gold.patch").read_text()
    gold.write_text(other.replace("+", "+ #", 1))
    done = _evalkit(tmp_path, "verify", "nano/train")
    assert done.returncode == 1
    assert "nano__train-0001: nothing resolves it nano__train-0001: the gold pat" in done.stdout
    assert "2 of 3 tasks certified; 0 trials lost" in done.stdout


def test_run_compare_regrade(nano: Path, tmp_path: Path) -> None:
    text = f"name: gold\ntasks: {{path: {nano / 'heldout'}}}\nagent: {{kind: oracle}}\n"
    (tmp_path / "recipes" / "eval").mkdir(parents=True)
    (tmp_path / "recipes" / "eval" / "gold.yaml").write_text(text)
    done = _evalkit(tmp_path, "run", "gold", "eval.attempts=2", "eval.k=[1,2]", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["outcomes"] == {"resolved": 4} and summary["no_reward"] == 0
    at_2 = summary["scores"]["pass@2"]
    assert at_2["value"] == at_2["high"] == 1.0 and at_2["tasks"] == 2
    assert 0.3 < at_2["low"] < 0.4  # two tasks are not many
    assert "differences of" in done.stderr and "4 resolved\n" in done.stderr  # the bar, at its end
    nop = _evalkit(tmp_path, "run", "gold", "agent.kind=nop", "name=nop")
    assert nop.returncode == 0 and "avg@1                0.000" in nop.stdout
    assert json.loads((tmp_path / "runs/gold/metrics.jsonl").read_text())["avg@2"] == 1.0
    compared = _evalkit(tmp_path, "compare", "runs/nop", "runs/gold", "--json")
    assert json.loads(compared.stdout)["value"] == 1.0
    again = _evalkit(tmp_path, "regrade", "runs/gold", "--json")
    assert again.returncode == 0 and json.loads(again.stdout) == {**summary, "changed": []}
    records = [tmp_path / "runs" / "gold" / f"{name}.jsonl" for name in ("trials", "regraded")]
    assert records[0].read_bytes() == records[1].read_bytes()
    kept = records[0].read_text()
    lied = kept.replace(
        '"outcome": "resolved", "reward": 1.0', '"outcome": "unresolved", "reward": 0.0', 1
    )
    records[0].write_text(lied)
    again = _evalkit(tmp_path, "regrade", "runs/gold")
    assert again.returncode == 1 and "unresolved → resolved" in again.stdout
    other = _evalkit(tmp_path, "run", "gold", "seed=1")
    assert other.returncode == 2 and "is of another recipe" in other.stderr
    of_nop = _evalkit(tmp_path, "regrade", "runs/nop", "--json")  # nothing was graded: all is there
    assert json.loads(of_nop.stdout)["outcomes"] == {"no_patch": 2}
    (tmp_path / "runs" / "swap").mkdir()
    (tmp_path / "runs" / "swap" / "trials.jsonl").write_text(kept)  # of the oracle
    swapped = _evalkit(tmp_path, "run", "gold", "agent.kind=nop", "name=swap", "--json")
    assert json.loads(swapped.stdout)["outcomes"] == {"no_patch": 2}


def test_what_is_missing_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command of a newcomer, on a machine without Docker, before any `just tasks`."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    (tmp_path / "r.yaml").write_text(
        "name: r\ntasks: {path: tasks/verified, limit: 5}\nagent: {kind: openhands}\n"
        "sandbox: {kind: docker}\n"
    )
    done = _evalkit(tmp_path, "run", "r.yaml")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    needs = ("needs model.base_url=http", "just tasks", "docker: no daemon answers; start one")
    assert all(text in done.stderr for text in needs), done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "nosuch"), "nosuch.yaml: cannot be read; recipes in recipes/eval: none"),
        (("run", "r.yaml", "agent.kind=nano"), "needs model.base_url"),
        (("run", "r.yaml", "eval.k=[9]"), "raise eval.attempts"),
        (("run", "r.yaml", "eval.k=[0]"), "eval.k"),
        (("run", "r.yaml", "eval.k=[]"), "eval.k"),
        (("run", "r.yaml", "cluster.backend=ray"), "set sandbox.kind"),
        (("run", "r.yaml", "agent.kind=command", "model.base_url=http://x"), "needs agent.command"),
        (
            ("run", "r.yaml", "agent.kind=mini", "model.base_url=http://x"),
            "./just setup mini makes it",
        ),
        (("report", "nowhere"), "nowhere: holds no trials.jsonl"),
        (("run", "r.yaml", "tasks.path=nowhere"), "nowhere: no such folder"),
        (("run", "r.yaml", "tasks.mirror=nowhere"), "no such mirror folder"),
        (("run", "r.yaml", "eval.trackr=wandb"), "did you mean tracker?"),
        (("verify", "nowhere"), "nowhere: no such folder"),
        (("verify", "nowhere", "sandbox.kind=jail"), "verify: sandbox.kind: Input should be"),
        (("compare", "a", "b"), "a: holds no trials.jsonl"),
        (("regrade", "a"), "cannot be read"),
        (("run",), "error: Missing argument 'RECIPE'"),
        (("run", "r.yaml", "--jsn"), "error: No such option"),
    ],
)
def test_wrong_input_is_one_line(
    nano: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    text = f"name: r\ntasks: {{path: {nano / 'heldout'}}}\nagent: {{kind: oracle}}\n"
    (tmp_path / "r.yaml").write_text(text)
    done = _evalkit(tmp_path, *args)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "r" / "trials.jsonl").exists()


def test_a_proxy_that_is_none_loses_trials_and_says_why(nano: Path, tmp_path: Path) -> None:
    text = f"name: r\ntasks: {{path: {nano / 'heldout'}}}\nagent: {{kind: oracle}}\n"
    (tmp_path / "r.yaml").write_text(text)
    done = _evalkit(tmp_path, "run", "r.yaml", "model.proxy=http://host:port")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    trials = [json.loads(x) for x in (tmp_path / "runs/r/trials.jsonl").read_text().splitlines()]
    assert trials and all(trial["reward"] is None for trial in trials)
    assert "a nanoswe-proxy's?" in trials[0]["error"]


def test_help() -> None:
    done = _evalkit(Path.cwd(), "--help")
    assert done.returncode == 0 and "verify" in done.stdout
