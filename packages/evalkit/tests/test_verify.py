"""Certificates: what is certified, what is named, and what is not run again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from nanoswe_evalkit.outcome import Outcome, reward_of
from nanoswe_evalkit.trial import Trial
from nanoswe_evalkit.verify import Certificate, _certify
from nanoswe_harbor.task import Task


def _verify(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanoswe_evalkit.cli", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_verdicts() -> None:
    def verdict(gold: str, nothing: str) -> str:
        words = {"r": "resolved", "u": "unresolved"}
        ends = (tuple(words[c] for c in text) for text in (gold, nothing))
        return Certificate("t", "k", "bwrap", *ends, (), ()).verdict

    assert verdict("rrr", "uuu") == "certified"
    assert verdict("uuu", "uuu") == "nothing resolves it"
    assert verdict("rrr", "rrr") == "resolved without a patch"
    assert verdict("rur", "uuu") == verdict("rrr", "uru") == "flaky"


def test_it_names_wrong_labels_flaky_tests_and_does_not_run_again(
    nano: Path, tmp_path: Path
) -> None:
    shutil.copytree(nano, tmp_path / "nano")
    train = tmp_path / "nano" / "train"
    shutil.rmtree(train / "nano__train-0002")
    expected = train / "nano__train-0001" / "tests" / "expected.json"
    lists = json.loads(expected.read_text())
    passing, failing = lists["pass_to_pass"][0], lists["fail_to_pass"][0]
    # A label that says fail-to-pass of a test that passes anyway, and one of a test there is not.
    lists["fail_to_pass"].append(passing)
    lists["pass_to_pass"] = ["test_nothing (tests.test_none.None.test_nothing)"]
    expected.write_text(json.dumps(lists))
    done = _verify(tmp_path, "verify", "nano/train", "--times", "2", "--json")
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["certified"] == 1 and told["lost"] == []
    (liar,) = told["liars"]
    assert (liar["task_id"], liar["verdict"]) == ("nano__train-0001", "nothing resolves it")
    assert liar["gold"] == liar["nothing"] == ["unresolved"] * 2
    assert set(liar["wrong_labels"]) == {passing, *lists["pass_to_pass"]}
    assert liar["flaky_tests"] == [] and failing not in liar["wrong_labels"]
    store = train / "certificates.jsonl"
    before = store.read_bytes()
    assert before.count(b"\n") == 2
    again = _verify(tmp_path, "verify", "nano/train", "--times", "2")
    assert again.returncode == 1 and store.read_bytes() == before
    assert "nano__train-0001: wrong labels " in again.stdout
    # A killed one may leave half a line.
    store.write_bytes(before + b'{"schema": "certificate/1", "ta')
    torn = _verify(tmp_path, "verify", "nano/train", "--times", "2")
    assert torn.returncode == 1 and store.read_bytes() == before
    for override in ("agent.kind=nop", "eval.share_verdicts=true"):
        forged = _verify(tmp_path, "verify", "nano/train", override)
        assert forged.returncode == 2 and "verify grades the oracle" in forged.stderr
    # Another content is certified anew; the others are not.
    shutil.copy(nano / "train" / "nano__train-0001" / "tests" / "expected.json", expected)
    mended = _verify(tmp_path, "verify", "nano/train", "--times", "2")
    assert mended.returncode == 0 and "2 of 2 tasks certified" in mended.stdout
    assert store.read_bytes().count(b"\n") == 3 and store.read_bytes().startswith(before)

    text = "name: r\ntasks: {path: nano/train}\nagent: {kind: oracle}\nsandbox: {kind: bwrap}\n"
    (tmp_path / "r.yaml").write_text(text)
    (train / "nano__train-0000" / "README.md").write_text("changed\n")
    ran = _verify(tmp_path, "run", "r.yaml", "--json")
    summary = json.loads(ran.stdout)
    assert (summary["tasks"], summary["certified"]) == (2, 1)
    assert summary["scores"]["avg@1 certified"]["tasks"] == 1
    kept = (tmp_path / "runs" / "r" / "certificates.jsonl").read_text().splitlines()
    assert [json.loads(line)["task_id"] for line in kept] == ["nano__train-0001"]
    assert "1 tasks certified" in _verify(tmp_path, "run", "r.yaml").stdout


def test_a_flaky_test_is_named(task: Task) -> None:
    broken, (flips, *others) = task.fail_to_pass[0], task.pass_to_pass

    def trial(outcome: Outcome, *passed: str) -> Trial:
        report = {"fail_to_pass": {"success": list(passed)}, "pass_to_pass": {"success": []}}
        ends = (None, outcome, reward_of(outcome), 0, "", report, {})
        return Trial("t", task.task_id, 0, 0, *ends)

    good, bad = Outcome.RESOLVED, Outcome.UNRESOLVED
    tests = (*task.fail_to_pass, *others)
    gold = [trial(good, *tests, flips), trial(bad, *tests), trial(good, *tests, flips)]
    nothing = [trial(bad, broken), trial(bad), trial(bad, broken)]
    made = _certify(task, "bwrap", gold, nothing)
    assert made.verdict == "flaky" and made.gold == ("resolved", "unresolved", "resolved")
    assert made.flaky_tests == tuple(sorted([flips, broken])) and made.wrong_labels == ()
