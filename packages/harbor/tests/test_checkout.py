"""checkout: the future is gone, nothing of the host leaks in, and bad requests are refused."""

import subprocess
from pathlib import Path

import pytest

from nanoswe_harbor.checkout import CheckoutError, checkout, git
from nanoswe_harbor.task import load_tasks


def test_the_fix_is_not_in_the_checkout(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "heldout")[0]
    bare = nano / "mirror" / f"{task.repo}.git"
    fix = git(bare, "rev-parse", "main").decode().strip()
    assert fix != task.base_commit
    tree = tmp_path / "tree"
    checkout(task.repo, task.base_commit, nano / "mirror", tree)
    assert git(tree, "rev-parse", "HEAD").decode().strip() == task.base_commit
    with pytest.raises(CheckoutError):
        git(tree, "cat-file", "-e", fix)
    assert git(tree, "rev-list", "--all", "--count").strip() == b"2"
    assert git(tree, "tag").strip() == git(tree, "remote").strip() == b""
    assert git(tree, "status", "--porcelain") == b""
    assert git(tree, "fsck", "--full", "--unreachable", "--no-reflogs") == b""


def test_hooks_and_configuration_of_the_host_do_not_run(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_tasks(nano / "heldout")[1]
    hooks, trap = tmp_path / "hooks", tmp_path / "ran"
    hooks.mkdir()
    for name in ("post-checkout", "post-index-change", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {trap}\n")
        (hooks / name).chmod(0o755)
    (tmp_path / ".gitconfig").write_text(f"[core]\n\thooksPath = {hooks}\n\tautocrlf = true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    checkout(task.repo, task.base_commit, nano / "mirror", tmp_path / "tree")
    assert not trap.exists()
    assert b"\r" not in (tmp_path / "tree" / "README.md").read_bytes()


@pytest.mark.parametrize(
    ("repo", "commit", "match"),
    [
        ("nano/none", "0" * 40, "no such bare repository"),
        ("nano/heldout-0000", "1" * 40, "1111"),
        ("nano/heldout-0000", "--all", "full commit id"),
        ("nano/../../x", "0" * 40, "owner/name"),
    ],
)
def test_bad_requests_leave_nothing(
    nano: Path, tmp_path: Path, repo: str, commit: str, match: str
) -> None:
    with pytest.raises(CheckoutError, match=match) as caught:
        checkout(repo, commit, nano / "mirror", tmp_path / "tree")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tree").exists()


def test_a_used_folder_is_left_alone(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "heldout")[0]
    (tmp_path / "mine").write_text("x")
    with pytest.raises(CheckoutError, match="not empty"):
        checkout(task.repo, task.base_commit, nano / "mirror", tmp_path)
    assert (tmp_path / "mine").read_text() == "x"


def test_a_real_clone_works_as_a_mirror(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "heldout")[2]
    bare = tmp_path / "mirror" / f"{task.repo}.git"
    source = nano / "mirror" / f"{task.repo}.git"
    subprocess.run(["git", "clone", "-q", "--mirror", str(source), str(bare)], check=True)
    checkout(task.repo, task.base_commit, tmp_path / "mirror", tmp_path / "tree")
    assert (tmp_path / "tree" / "README.md").is_file()
