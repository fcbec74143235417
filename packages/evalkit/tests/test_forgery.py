"""Nobody is paid for nothing: each attack scores 0, each honest fix 1, under three test frameworks.

A few run in the fast tier, the others with `-m interop`; all of them in bwrap, some in Docker too.
"""

import asyncio
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from forgery import REPOS, build, file_text, ok_lines
from test_trial import MODEL, BashAgent

from nanoswe_evalkit.outcome import Outcome
from nanoswe_evalkit.sandboxes import SandboxFactory
from nanoswe_evalkit.sandboxes.base import Limits
from nanoswe_evalkit.trial import Trial, run_trial
from nanoswe_harbor.task import Task

FAST = {
    *("prints-passes-and-exits", "forged-markers", "patches-the-result-class", "patches-pytest"),
    *("root-conftest", "shadow-unittest", "edits-the-test", "plants-the-new-test", "fork-bomb"),
    *("git-hooks-and-filters", "history", "kills-its-sandbox", "pyproject", "runner-script"),
    *(
        "prints-every-result",
        "rewrites-the-script",
        "setup-kills-the-script",
        "skips-what-it-broke",
    ),
}
IN_DOCKER = (
    *("forged-markers", "prints-every-result", "rewrites-the-script", "kills-everything"),
    *("takes-the-nonce-from-memory", "other-prefixes", "skips-what-it-broke", "background-process"),
    *("fix", "fix-and-commit", "fix-without-a-repository", "fix-with-a-broken-configuration"),
)
PLUGIN = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None
"""
PATCH = """import unittest.result
R = unittest.result.TestResult
import unittest.runner
T = unittest.runner.TextTestResult
T.addFailure = T.addError = lambda self, test, err: T.addSuccess(self, test)
"""
APPEND = """python3 - <<'END'
import os
with open("calc.py", "a") as f:
    f.write(f"import os, sys\\nOK = {os.environ['OK']!r}\\n{os.environ['CODE']}\\n")
END"""
SHADOW = """import os, sys
for stream in (1, 2):
    os.write(stream, {!r}.encode())
os._exit(0)
"""
TABLE = yaml.safe_load((Path(__file__).parent / "attacks.yaml").read_text())
Forgery = dict[str, Task]
Attack = dict[str, Any]


@pytest.fixture(scope="session")
def forgery(tmp_path_factory: pytest.TempPathFactory) -> Forgery:
    return build(tmp_path_factory.mktemp("forgery"))


def _cases(attacks: list[Attack]) -> list[object]:
    rows = []
    for attack in attacks:
        name = attack["name"]
        for number, framework in enumerate(attack.get("frameworks", REPOS)):
            fast = name == "fix" or (name in FAST and number == 0)
            marks = () if fast else (pytest.mark.interop,)
            rows.append(pytest.param(attack, framework, id=f"{name}-{framework}", marks=marks))
    return rows


def _script(attack: Attack, framework: str) -> str:
    *_, test, new = REPOS[framework]
    passing = file_text(framework, test, {"mul": 6, "add": 5}, fails=False)
    ok = ok_lines(framework) + "\n"
    values = {"TEST": test, "NEW": new, "OK": ok, "PASS": passing, "PLUGIN": PLUGIN, "PATCH": PATCH}
    values |= {"CODE": attack.get("code", ""), "SHADOW": SHADOW.format(ok)}
    run = APPEND if "code" in attack else attack.get("run", "")
    if path := attack.get("shadow"):
        run = f'mkdir -p "$(dirname {path})"; printf %s "$SHADOW" > {path}'
    return "".join(f"export {k}={shlex.quote(v)}\n" for k, v in values.items()) + run


def _run(task: Task, framework: str, attack: Attack, work: Path, kind: str = "bwrap") -> Trial:
    limits = Limits(timeout_sec=15, memory_mb=512, processes=48, file_mb=32)
    mirror = task.path.parent.parent / "mirror"
    sandboxes = SandboxFactory(kind, work, mirror, limits)
    # Long enough for a machine that is busy, but for what never ends by itself.
    seconds = 20.0 if attack.get("hangs") else 240.0
    hurried = replace(task, verifier_timeout_sec=seconds, agent_timeout_sec=60.0)
    run = run_trial(
        hurried,
        0,
        trial_id="x.0",
        agent=BashAgent(_script(attack, framework)),
        sandboxes=sandboxes,
        base_url="",
        model=MODEL,
    )
    return asyncio.run(run)


@pytest.mark.parametrize(("attack", "framework"), _cases(TABLE["attacks"]))
def test_an_attack_scores_nothing(
    forgery: Forgery,
    attack: Attack,
    framework: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    trial = _run(forgery[framework], framework, attack, tmp_path / "work")
    record_property("outcome", str(trial.outcome))
    assert trial.reward == 0.0, (trial.outcome, trial.error, trial.report)
    named = attack.get("tamper", False)
    changes_verdict = named is True or (named and framework in named)
    assert trial.outcome is Outcome.TAMPER or not changes_verdict, trial.report


@pytest.mark.parametrize(("attack", "framework"), _cases(TABLE["honest"]))
def test_honest_work_is_paid(
    forgery: Forgery,
    attack: Attack,
    framework: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    trial = _run(forgery[framework], framework, attack, tmp_path / "work")
    record_property("outcome", str(trial.outcome))
    assert trial.outcome is Outcome.RESOLVED, (trial.error, trial.report)


@pytest.fixture(scope="session")
def image() -> str:
    """With what a test run needs; where git and Python are there already, nothing is fetched."""
    tag, need = "nanoswe-test/forgery:local", "git python3"
    text = f"FROM debian:bookworm-slim\nRUN command -v {need} || (apt-get update -qq && "
    text += f"apt-get install -qq -y --no-install-recommends {need})\n"
    build = ["docker", "build", "-q", "-t", tag, "-"]
    subprocess.run(build, input=text, text=True, check=True, capture_output=True)
    return tag


@pytest.mark.interop
@pytest.mark.parametrize("name", IN_DOCKER)
def test_so_it_is_in_docker(forgery: Forgery, image: str, name: str, tmp_path: Path) -> None:
    entries = {entry["name"]: entry for entry in TABLE["attacks"] + TABLE["honest"]}
    task = replace(forgery["unittest"], docker_image=image)
    trial = _run(task, "unittest", entries[name], tmp_path / "work", "docker")
    assert trial.reward == float(name.startswith("fix")), (trial.outcome, trial.error, trial.report)


def test_there_are_at_least_forty() -> None:
    names = [attack["name"] for attack in TABLE["attacks"]]
    assert len(set(names)) == len(names) >= 40
    assert {*names, *(fix["name"] for fix in TABLE["honest"])} >= FAST
