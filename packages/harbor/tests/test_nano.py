"""nano: words, splits, determinism, and the three repairs judged by really running the tests."""

import builtins
import keyword
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoswe_harbor.checkout import checkout
from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.nano import BUGS, SPLITS, WORDS, NanoCase, cases, fix_command
from nanoswe_harbor.nano.build import build
from nanoswe_harbor.task import Task, load_tasks


def test_words_are_safe_names() -> None:
    taken = {
        *keyword.kwlist,
        *dir(builtins),
        *sys.stdlib_module_names,
        "tests",
    }
    assert not taken & set(WORDS)
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert all(3 <= len(word) <= 9 for word in WORDS)


def test_there_are_ten_kinds_with_three_different_expressions() -> None:
    assert len({bug.kind for bug in BUGS}) == len(BUGS) >= 10
    assert all(len({bug.good, bug.bug, bug.tempting}) == 3 for bug in BUGS)
    assert not any("|" in text for bug in BUGS for text in (bug.good, bug.bug, bug.tempting))


def test_splits_share_no_function_name_at_any_seed() -> None:
    names = {
        split: {
            f.name
            for seed in range(5)
            for case in cases(split, 400, seed)
            for f in case.functions + case.other_functions
        }
        for split in SPLITS
    }
    assert len(names["train"]) > 200 and len(names["heldout"]) > 100
    assert not names["train"] & names["heldout"]


def test_a_case_depends_on_split_seed_and_index_alone() -> None:
    assert list(cases("train", 40, 7))[:20] == list(cases("train", 20, 7))
    assert list(cases("train", 20, 7)) != list(cases("train", 20, 8))
    with pytest.raises(ValueError, match="unknown split"):
        next(cases("test", 1, 0))


def test_cases_are_fast() -> None:
    start = time.process_time()
    assert len(list(cases("train", 2000, 3))) == 2000
    assert time.process_time() - start < 2


def test_build_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        [build(case, tmp_path / name) for case in cases("train", 3, 0)] for name in "ab"
    )
    assert first == second
    files = [{p.relative_to(tmp_path / n): p for p in (tmp_path / n).rglob("*")} for n in "ab"]
    assert files[0].keys() == files[1].keys()
    for name, path in files[0].items():
        assert path.is_dir() or path.read_bytes() == files[1][name].read_bytes()


def run_eval(task: Task, tree: Path) -> tuple[str, int]:
    env = {**os.environ, "TESTS": str(task.path / "tests"), "NANOSWE_NONCE": "n1"}
    command = ["bash", str(task.path / "tests/run_eval.sh")]
    done = subprocess.run(
        command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.stdout, done.returncode


def judge(case: NanoCase, task: Task, mirror: Path, tree: Path, expression: str) -> dict:
    checkout(task.repo, task.base_commit, mirror, tree)
    assert (tree / case.file_name).read_text() == case.file_text
    subprocess.run(["bash", "-c", fix_command(case, expression)], cwd=tree, check=True)
    log, code = run_eval(task, tree)
    expected = {
        "parser": task.parser,
        "fail_to_pass": task.fail_to_pass,
        "pass_to_pass": task.pass_to_pass,
    }
    return grade(log, expected, code, "n1")


@pytest.mark.parametrize("split", SPLITS)
def test_gold_passes_and_both_wrong_expressions_fail(
    nano: Path, tmp_path: Path, split: str
) -> None:
    tasks = {task.task_id: task for task in load_tasks(nano / split)}
    kinds = set()
    for case in cases(split, len(BUGS), 0):
        task = tasks[case.instance_id]
        assert task.instruction == case.issue + "\n"
        for name in ("good", "bug", "tempting"):
            tree = tmp_path / f"{case.instance_id}.{name}"
            report = judge(case, task, nano / "mirror", tree, getattr(case, name))
            assert report["resolved"] is (name == "good"), (case, name, report)
            assert not report["infra"]
            assert not report["pass_to_pass"]["failure"]
            assert name == "good" or not report["fail_to_pass"]["success"]
        kinds.add(case.kind)
    assert len(kinds) == len(BUGS)


def test_the_gold_patch_is_the_good_expression(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "train")[3]
    (case,) = [case for case in cases("train", 4, 0) if case.instance_id == task.task_id]
    checkout(task.repo, task.base_commit, nano / "mirror", tmp_path / "tree")
    env = {**os.environ, "SOLUTION": str(task.path / "solution")}
    solve = ["bash", str(task.path / "solution/solve.sh")]
    subprocess.run(solve, cwd=tmp_path / "tree", env=env, check=True)
    assert case.target.source(case.good) in (tmp_path / "tree" / case.file_name).read_text()


def test_a_model_that_edits_the_tests_gains_nothing(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "train")[0]
    checkout(task.repo, task.base_commit, nano / "mirror", tmp_path / "tree")
    (tmp_path / "tree" / task.test_files[0]).write_text("raise SystemExit(0)\n")
    log, code = run_eval(task, tmp_path / "tree")
    assert "test_patch" not in log and code == 1
