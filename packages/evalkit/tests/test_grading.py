"""What the run of the tests without the patch decides: whose fault it is, and what is excused."""

import base64
import zlib
from typing import Any

import pytest

from nanoswe_evalkit.grading import judge_logs
from nanoswe_evalkit.outcome import Outcome
from nanoswe_harbor.task import Task


def _run(task: Task, began: bool = True, word: str = "ok", fixed: bool = True) -> dict[str, Any]:
    """A run of the tests in which the pass-to-pass tests come to `word`."""
    words = {**dict.fromkeys(task.pass_to_pass, word)}
    words |= dict.fromkeys(task.fail_to_pass, "ok" if fixed else "FAIL")
    lines = [f"{test} ... {end}" for test, end in words.items()]
    shown = {"ok": "PASSED", "FAIL": "FAILED", "skipped 'x'": "SKIPPED"}
    record = [f"{shown[end]} {test}" for test, end in words.items()]
    parts = (">>>>> Start Test Output n", *lines, ">>>>> End Test Output n 0", ">>>>> Results n")
    log = "\n".join((*parts, *record, ">>>>> End Results n", ""))
    packed = base64.b85encode(zlib.compress(log.encode() if began else b"Terminated\n")).decode()
    return {"log": packed, "exit_code": 0 if began else 143, "nonce": "n"}


SKIP = "skipped 'x'"
CONTROL = {"control": True}


@pytest.mark.parametrize(
    ("run", "control", "outcome"),
    [
        ({"began": False}, {"fixed": False}, Outcome.UNRESOLVED),  # the patch ended it
        ({"began": False}, {"began": False}, Outcome.GRADER_ERROR),  # it never begins
        ({"word": SKIP}, {"fixed": False}, Outcome.UNRESOLVED),  # the patch skips what passed
        ({"word": SKIP}, {"fixed": False, "word": SKIP}, Outcome.RESOLVED),
    ],
)
def test_the_run_without_the_patch_decides(
    task: Task, run: dict[str, Any], control: dict[str, Any], outcome: Outcome
) -> None:
    first, second = _run(task, **run), _run(task, **control) | CONTROL
    assert judge_logs(task, [first], []).unsure
    verdict = judge_logs(task, [first, second], [])
    assert (verdict.outcome, verdict.unsure) == (outcome, False)
    assert verdict.report is not None and verdict.report["runs"] == [first, second]
    # the same where the policy dropped something
    verdict = judge_logs(task, [first, first, second], ["conftest.py"])
    assert verdict.outcome is outcome


def test_a_whole_patch_that_does_not_reinstall_has_forged_nothing(task: Task) -> None:
    """As with a changed pyproject.toml, which the policy drops: unresolved, not tamper."""
    kept, whole, control = _run(task), _run(task, began=False), _run(task, fixed=False) | CONTROL
    assert judge_logs(task, [kept, whole], ["pyproject.toml"]).unsure
    verdict = judge_logs(task, [kept, whole, control], ["pyproject.toml"])
    assert (verdict.outcome, verdict.unsure) == (Outcome.UNRESOLVED, False)
    verdict = judge_logs(task, [kept, whole, whole | CONTROL], ["pyproject.toml"])
    assert verdict.outcome is Outcome.GRADER_ERROR
    verdict = judge_logs(task, [kept, _run(task, fixed=False)], ["pyproject.toml"])
    assert verdict.outcome is Outcome.TAMPER


def test_mostly_nobody_has_to_ask(task: Task) -> None:
    for fixed in (True, False):
        verdict = judge_logs(task, [_run(task, fixed=fixed)], [])
        assert not verdict.unsure and (verdict.outcome is Outcome.RESOLVED) is fixed
