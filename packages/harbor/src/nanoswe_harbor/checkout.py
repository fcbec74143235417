"""checkout: the repository at its base commit, without a future.

In: a mirror (a folder of bare repositories `owner/name.git`, or a URL above such) and a commit.
Out: a work tree on `main` whose object store holds what the commit and its older tags reach: no
other refs, remotes, reflogs, objects. Git runs without system or user configuration, hooks or lazy
fetches. Refuses (CheckoutError) a missing mirror or commit, a used destination, a result that is
not so.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
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
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
}
SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*")
REPO = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
CLONING = threading.Lock()
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"


class CheckoutError(HarborError):
    """The checkout could not be made, or is not what it promises to be."""


def checkout(task_repo: str, base_commit: str, mirror: Path | str, dest: Path) -> None:
    """Materialise `base_commit` of `mirror/<task_repo>.git` in `dest` (new or empty). What a URL
    gives is kept beside it."""
    if not re.fullmatch(r"[0-9a-f]{40}", base_commit) or not re.fullmatch(REPO, task_repo):
        raise CheckoutError(f"{task_repo} at {base_commit}: want owner/name and a full commit id")
    source = bare_repository(mirror, task_repo, dest.with_name(f".{dest.name}.mirror"))
    if dest.exists() and any(dest.iterdir()):
        raise CheckoutError(f"{dest}: not empty; give a new folder")
    dest.mkdir(parents=True, exist_ok=True)
    try:
        _fill(source, base_commit, dest)
        _assert_scrubbed(base_commit, dest)
    except BaseException:
        shutil.rmtree(dest, ignore_errors=True)
        raise


def bare_repository(mirror: Path | str, repo: str, cache: Path) -> Path:
    """`repo` in a folder of bare repositories; from a URL above such, it is cloned into `cache`."""
    bare = (cache if "://" in str(mirror) else Path(mirror)) / f"{repo}.git"
    with CLONING:
        if "://" in str(mirror) and not bare.is_dir():
            bare.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                git(cache, "clone", "-q", "--bare", "--", f"{mirror}/{repo}.git", f"{scratch}/bare")
                Path(scratch, "bare").rename(bare)
    if not (bare / "HEAD").is_file():
        raise CheckoutError(f"{bare}: no such bare repository; is this the right mirror?")
    return bare


def check_patches(bare: Path, base_commit: str, patches: list[str]) -> None:
    """Raise CheckoutError unless each patch applies to the commit. Writes nothing to `bare`."""
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": f"{scratch}/index"}
        git(bare, "read-tree", base_commit, env=index)
        for patch in filter(None, patches):
            git(bare, "apply", "--check", "--cached", "-", stdin=patch.encode(), env=index)


def git(cwd: Path, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> bytes:
    """Run git in `cwd`, isolated from configuration and hooks; its stdout, or CheckoutError."""
    # Git's own variables (GIT_DIR, GIT_INDEX_FILE, …) of a caller inside a hook must not leak in.
    env = {"PATH": os.environ.get("PATH", os.defpath), **GIT_ENV, **(env or {})}
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
    # A pack made from these commits holds what they reach and nothing else.
    tags = _older_tags(source, base_commit)
    revs = "".join(f"{commit}\n" for commit in (base_commit, *tags.values()))
    pack = str((dot_git / "objects/pack/pack").absolute())
    # Run in `dest`, so that its temporary files are on the filesystem where the pack goes.
    quoted = json.dumps(str((source / "objects").absolute()), ensure_ascii=False)
    borrow = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": quoted}
    make = ("pack-objects", "--revs", "-q", "--threads=1", pack)
    git(dest, *make, stdin=revs.encode(), env=borrow)
    (dot_git / "packed-refs").write_text("".join(f"{tags[name]} {name}\n" for name in sorted(tags)))
    (dot_git / "refs/heads/main").write_text(f"{base_commit}\n")
    git(dest, "read-tree", "--reset", "-u", base_commit)


def _older_tags(source: Path, base_commit: str) -> dict[str, str]:
    """Tags of ancestors (setuptools_scm needs them) that were made no later than the commit."""
    made = int(git(source, "log", "-1", "--format=%ct", base_commit))
    form = "--format=%(objectname) %(creatordate:unix) %(refname)"
    lines = git(source, "for-each-ref", f"--merged={base_commit}", form, "refs/tags").decode()
    found = (line.split(" ", 2) for line in lines.splitlines())
    return {name: commit for commit, date, name in found if int(date or 0) <= made}


def _assert_scrubbed(base_commit: str, dest: Path) -> None:
    dot_git = dest / ".git"
    head, *tags = git(dest, "show-ref").decode().splitlines()
    foreign = [tag for tag in tags if " refs/tags/" not in tag]
    if head != f"{base_commit} refs/heads/main" or foreign:
        raise CheckoutError(f"{dest}: refs besides the base commit: {[head, *foreign]}")
    if git(dest, "rev-list", "-n1", "--tags", "--not", "HEAD"):
        raise CheckoutError(f"{dest}: a tag of a commit that is no ancestor of the base commit")
    left = [n for n in ("logs", "objects/info/alternates") if (dot_git / n).exists()]
    if left or (dot_git / "config").read_text() != CONFIG:
        raise CheckoutError(f"{dest}: a reflog, an alternate object store or a remote is left")
    reachable = len(git(dest, "rev-list", "--objects", "HEAD", "--tags").splitlines())
    counts = re.findall(rb"(?m)^(?:count|in-pack): (\d+)$", git(dest, "count-objects", "-v"))
    if (stored := sum(map(int, counts))) != reachable:
        raise CheckoutError(f"{dest}: {stored} objects stored, {reachable} reachable from the base")
    if dirt := git(dest, "status", "--porcelain").decode():
        raise CheckoutError(f"{dest}: the tree is not clean: {dirt.splitlines()[0]}")
