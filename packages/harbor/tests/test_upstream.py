"""Upstream's own `harbor` on tasks that we emit, through real Docker; and ours on one of theirs."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoswe_harbor.checkout import checkout
from nanoswe_harbor.grader.parsers import PARSERS
from nanoswe_harbor.task import load_task

pytestmark = pytest.mark.interop
ROOT = Path(__file__).resolve().parents[3]
BASE = "nanoswe-test/base:local"
DOCKERFILE = """\
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends git python3 > /dev/null
ENTRYPOINT []
STOPSIGNAL SIGKILL
"""
ENV = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": ""}
# File of idna 3.7, what is right, what the base commit has instead, and the test that tells.
BUGS = {
    "idna/core.py": ("if len(label) > 63:", "if len(label) > 64:", "test_valid_label_length"),
    "idna/codec.py": ("b'.'.join(result) +", "b','.join(result) +", "testIncrementalEncoder"),
}
TESTS = {"idna/core.py": "tests/test_idna.py", "idna/codec.py": "tests/test_idna_codec.py"}


def command(*argv: str, cwd: Path | None = None, stdin: str = "") -> str:
    done = subprocess.run(
        argv, cwd=cwd, input=stdin, text=True, capture_output=True, env={**os.environ, **ENV}
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def harbor() -> str:
    """Upstream's command, in an environment of its own."""
    folder = ROOT / ".nox/harbor-cli"
    command(str(ROOT / "tools/harbor"), str(folder))
    return str(folder / "bin/harbor")


@pytest.fixture(scope="session")
def image() -> Iterator[Callable[[str, Path], str]]:
    """Builds an image with a tree in /testbed."""
    command("docker", "build", "-q", "-t", BASE, "-", stdin=DOCKERFILE)
    built = []

    def build(name: str, tree: Path) -> str:
        tag = f"nanoswe-test/{name.lower()}:local"
        text = f"FROM {BASE}\nCOPY . /testbed\nWORKDIR /testbed\n"
        command("docker", "build", "-q", "-t", tag, "-f", "-", str(tree), stdin=text)
        built.append(tag)
        return tag

    yield build
    for tag in built:
        command("docker", "rmi", "-f", tag)


def git(tree: Path, *argv: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "core.autocrlf=false")
    return command("git", *who, *argv, cwd=tree)


def without(text: str, test: str) -> str:
    """A test module without one method."""
    classes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]
    (found,) = [f for c in classes for f in c.body if getattr(f, "name", "") == test]
    lines = text.splitlines(keepends=True)
    return "".join(lines[: found.lineno - 1] + lines[found.end_lineno :])


def statuses(tree: Path, modules: list[str]) -> dict[str, str]:
    argv = (sys.executable, "-B", "-m", "unittest", "-v", *modules)
    done = subprocess.run(argv, cwd=tree, capture_output=True, text=True, check=False)
    return PARSERS["unittest"](done.stderr)


def package_row(folder: Path, tree: Path, bugs: list[str]) -> dict[str, Any]:
    """A row made of idna's source distribution: the base commit has bugs and not their tests.

    FAIL_TO_PASS and PASS_TO_PASS come from real runs of the real suite, before and after the fix.
    """
    command(
        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
        *("--no-binary", ":all:", "-d", str(folder), "idna==3.7"),
    )
    command("tar", "xzf", "idna-3.7.tar.gz", cwd=folder)
    (folder / "idna-3.7").rename(tree)
    git(tree, "init", "-q", "-b", "main")
    for name in bugs:
        right, wrong, test = BUGS[name]
        text = (tree / name).read_text()
        assert text.count(right) == 1
        (tree / name).write_text(text.replace(right, wrong))
        tests = (tree / TESTS[name]).read_text()
        (tree / TESTS[name]).write_text(without(tests, test))
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "base")
    base = git(tree, "rev-parse", "HEAD").strip()
    command("tar", "xzf", str(folder / "idna-3.7.tar.gz"), "--strip-components=1", cwd=tree)
    patch, test_patch = git(tree, "diff", "--", "idna"), git(tree, "diff", "--", "tests")
    modules = [TESTS[name].removesuffix(".py").replace("/", ".") for name in bugs]
    after = statuses(tree, modules)
    git(tree, "checkout", "-q", "--", "idna")
    before = statuses(tree, modules)
    git(tree, "checkout", "-q", "--", ".")
    passing = sorted(test for test, word in after.items() if word == "PASSED")
    return {
        "instance_id": f"idna__idna-{len(bugs)}",
        "repo": "nano/idna",  # plain unittest, as nano's repositories
        "version": "1",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": "A label of 64 characters is accepted.",
        "FAIL_TO_PASS": [test for test in passing if before.get(test) != "PASSED"],
        "PASS_TO_PASS": [test for test in passing if before.get(test) == "PASSED"],
    }


@pytest.fixture(scope="session")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, nano: Path, image: Callable[[str, Path], str]
) -> Path:
    """Two nano tasks and two of a real package, one of them in two files; as emitted, but for the
    name of the image: each task's repository is in an image of its own."""
    folder = tmp_path_factory.mktemp("upstream")
    trees = {}
    for path in sorted((nano / "train").glob("nano__*"))[:2]:
        task = load_task(path)
        trees[path] = folder / f"tree-{path.name}"
        checkout(task.repo, task.base_commit, nano / "mirror", trees[path])
    rows = []
    for bugs in (["idna/core.py"], ["idna/core.py", "idna/codec.py"]):
        work = folder / f"work-{len(bugs)}"
        work.mkdir()
        tree = folder / f"tree-{len(bugs)}"
        row = package_row(work, tree, bugs)
        assert len(row["FAIL_TO_PASS"]) >= len(bugs) and len(row["PASS_TO_PASS"]) > 5
        trees[folder / "rows" / row["instance_id"]] = tree
        rows.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    ours = (sys.executable, "-m", "nanoswe_harbor")
    command(*ours, "convert", str(folder / "rows.jsonl"), "--out", str(folder / "rows"))
    command(*ours, "verify-format", str(folder / "rows"))
    out = folder / "tasks"
    for path, tree in trees.items():
        shutil.copytree(path, out / path.name)
        tag = image(path.name, tree)
        for name in ("task.toml", "environment/Dockerfile"):
            text = (out / path.name / name).read_text()
            text = re.sub(r'(docker_image = |^FROM )"?[^"\n]*"?', rf'\1"{tag}"', text)
            (out / path.name / name).write_text(text.replace(f'FROM "{tag}"', f"FROM {tag}"))
    return out


def run(harbor: str, tasks: Path, agent: str, jobs: Path) -> dict[str, dict[str, Any]]:
    """Task name → result.json of its trial."""
    command(
        *(harbor, "run", "-p", str(tasks), "-a", agent, "-n", "2", "-q", "-y"),
        *("--jobs-dir", str(jobs), "--job-name", agent),
    )
    results = [json.loads(path.read_text()) for path in jobs.glob(f"{agent}/*/result.json")]
    return {result["task_name"].split("/")[-1]: result for result in results}


def test_upstream_finds_no_fault_in_the_folders(harbor: str, dataset: Path) -> None:
    for task in sorted(dataset.iterdir()):
        assert json.loads(command(harbor, "lint", "--json", str(task))) == []


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_upstream_runs_them(
    harbor: str, dataset: Path, tmp_path: Path, agent: str, reward: float
) -> None:
    results = run(harbor, dataset, agent, tmp_path)
    assert len(results) == 4
    for name, result in results.items():
        assert result["exception_info"] is None, (name, result["exception_info"])
        assert result["verifier_result"]["rewards"] == {"reward": reward}, name
        (report,) = tmp_path.glob(f"{agent}/*{name[:20]}*/verifier/report.json")
        assert json.loads(report.read_text())["resolved"] is (reward == 1.0)
    total = json.loads((tmp_path / agent / "result.json").read_text())["stats"]
    assert [e["metrics"][0]["mean"] for e in total["evals"].values()] == [reward]
