"""checkout: the repository at its base commit, without a future.

In: a mirror folder of bare repositories (`owner/name.git`), a repository name and a commit.
Out: a work tree on branch `main` at that commit, whose object store holds exactly what the commit
reaches: no other refs, remotes, reflogs or later objects. Git runs without system or user
configuration, hooks, lazy fetches or network. Refuses (CheckoutError) a missing mirror or commit,
a destination that is not empty, and a result that does not keep these promises.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from nanoswe_harbor.instance import HarborError

GIT_ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
}
SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*")
REPO = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"


class CheckoutError(HarborError):
    """The checkout could not be made, or is not what it promises to be."""


def checkout(task_repo: str, base_commit: str, mirror: Path, dest: Path) -> None:
    """Materialise `base_commit` of `mirror/<task_repo>.git` in `dest` (new or empty)."""
    if not re.fullmatch(r"[0-9a-f]{40}", base_commit) or not re.fullmatch(REPO, task_repo):
        raise CheckoutError(f"{task_repo} at {base_commit}: want owner/name and a full commit id")
    source = mirror / f"{task_repo}.git"
    if not (source / "HEAD").is_file():
        raise CheckoutError(f"{source}: no such bare repository; is this the right mirror?")
    if dest.exists() and any(dest.iterdir()):
        raise CheckoutError(f"{dest}: not empty; give a new folder")
    dest.mkdir(parents=True, exist_ok=True)
    try:
        _fill(source, base_commit, dest)
        _assert_scrubbed(base_commit, dest)
    except BaseException:
        shutil.rmtree(dest, ignore_errors=True)
        raise


def git(cwd: Path, *args: str, stdin: bytes = b"") -> bytes:
    """Run git in `cwd`, isolated from configuration and hooks; its stdout, or CheckoutError."""
    # Git's own variables (GIT_DIR, GIT_INDEX_FILE, …) of a caller inside a hook must not leak in.
    env = {"PATH": os.environ.get("PATH", os.defpath), **GIT_ENV}
    try:
        done = subprocess.run(
            ["git", *SAFE, *args], cwd=cwd, env=env, input=stdin, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise CheckoutError("git: not found; install git") from error
    if done.returncode:
        message = " ".join(done.stderr.decode(errors="replace").split()) or "failed"
        raise CheckoutError(f"git {args[0]} in {cwd}: {message}")
    return done.stdout


def _fill(source: Path, base_commit: str, dest: Path) -> None:
    dot_git = dest / ".git"
    for folder in ("objects/pack", "objects/info", "refs/heads", "refs/tags", "info"):
        (dot_git / folder).mkdir(parents=True)
    (dot_git / "config").write_text(CONFIG)
    (dot_git / "HEAD").write_text("ref: refs/heads/main\n")
    # A pack made from one commit holds what that commit reaches and nothing else.
    revs = f"{base_commit}\n".encode()
    pack = git(source, "pack-objects", "--revs", "--stdout", "--quiet", "--threads=1", stdin=revs)
    git(dest, "index-pack", "--stdin", "--threads=1", stdin=pack)
    (dot_git / "refs/heads/main").write_text(f"{base_commit}\n")
    git(dest, "read-tree", "--reset", "-u", base_commit)


def _assert_scrubbed(base_commit: str, dest: Path) -> None:
    dot_git = dest / ".git"
    head, *refs = git(dest, "show-ref").decode().splitlines()
    if head != f"{base_commit} refs/heads/main" or refs:
        raise CheckoutError(f"{dest}: refs besides the base commit: {[head, *refs]}")
    if (dot_git / "logs").exists() or (dot_git / "objects/info/alternates").exists():
        raise CheckoutError(f"{dest}: a reflog or an alternate object store is left")
    if "remote" in (dot_git / "config").read_text():
        raise CheckoutError(f"{dest}: a remote is configured")
    reachable = len(git(dest, "rev-list", "--objects", "HEAD").splitlines())
    if (stored := _stored_objects(dot_git / "objects")) != reachable:
        raise CheckoutError(f"{dest}: {stored} objects stored, {reachable} reachable from the base")
    if dirt := git(dest, "status", "--porcelain").decode():
        raise CheckoutError(f"{dest}: the tree is not clean: {dirt.splitlines()[0]}")


def _stored_objects(objects: Path) -> int:
    """Objects in loose files and packs; a pack says its count in bytes 8 to 12."""
    count = sum(1 for path in objects.glob("[0-9a-f][0-9a-f]/*"))
    for path in objects.glob("pack/*.pack"):
        with path.open("rb") as pack:
            count += int.from_bytes(pack.read(12)[8:], "big")
    return count
