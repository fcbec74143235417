"""checkout: the future is gone, nothing of the host leaks in, and bad requests are refused."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from nanoswe_harbor.checkout import CheckoutError, _assert_scrubbed, checkout, git
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


def test_the_mirror_may_be_on_another_filesystem(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "heldout")[0]
    shutil.copytree(nano / "mirror", tmp_path / 'a : "mirror"')
    other = "/dev/shm" if Path("/dev/shm").stat().st_dev != tmp_path.stat().st_dev else tmp_path
    with tempfile.TemporaryDirectory(dir=other) as folder:
        checkout(task.repo, task.base_commit, tmp_path / 'a : "mirror"', Path(folder, "tree"))
        assert git(Path(folder, "tree"), "status", "--porcelain") == b""


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


@pytest.mark.parametrize(
    ("command", "match"),
    [
        ("git branch other", "refs besides the base commit"),
        ("git update-ref refs/stash HEAD", "refs besides the base commit"),
        ("git tag late $(git commit-tree -p HEAD -m x HEAD^{tree})", "no ancestor of the base"),
        ("git remote add origin /mirror", "a remote is left"),
        ("mkdir -p .git/logs && echo x > .git/logs/HEAD", "a reflog"),
        ("echo /mirror/objects > .git/objects/info/alternates", "an alternate object store"),
        ("echo future | git hash-object -w --stdin", "objects stored"),
        ("echo x > left-over", "not clean"),
    ],
)
def test_what_is_not_so_is_refused(nano: Path, tmp_path: Path, command: str, match: str) -> None:
    """The state is asserted after it is made: each way of it not being so is told apart."""
    task, tree = load_tasks(nano / "heldout")[0], tmp_path / "tree"
    checkout(task.repo, task.base_commit, nano / "mirror", tree)
    _assert_scrubbed(task.base_commit, tree)
    who = "export GIT_COMMITTER_NAME=x GIT_COMMITTER_EMAIL=x GIT_AUTHOR_NAME=x GIT_AUTHOR_EMAIL=x; "
    subprocess.run(["bash", "-c", who + command], cwd=tree, check=True, capture_output=True)
    with pytest.raises(CheckoutError, match=match):
        _assert_scrubbed(task.base_commit, tree)


def test_a_mirror_behind_a_url_is_kept(nano: Path, tmp_path: Path) -> None:
    task = load_tasks(nano / "heldout")[3]
    checkout(task.repo, task.base_commit, f"file://{nano}/mirror", tmp_path / "tree")
    assert (tmp_path / "tree" / "README.md").is_file()
    assert (tmp_path / ".tree.mirror" / f"{task.repo}.git" / "HEAD").is_file()
