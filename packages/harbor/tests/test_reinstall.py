"""The reinstall before the tests: really run, on a small repository whose build is its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoswe_harbor.convert import task_files
from nanoswe_harbor.grader.grade import grade
from nanoswe_harbor.instance import Instance

BUILD = """\
import zipfile


def build_wheel(folder, *_):
    name = "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("tiny.py")
        text = "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n"
        wheel.writestr("tiny-1.dist-info/METADATA", text)
        wheel.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return name
"""
TABLE = '[build-system]\nrequires = []\nbuild-backend = "build_tiny"\nbackend-path = ["."]\n'
FILES = {
    "tiny.py": "def double(x):\n    return 2 * x\n",
    "build_tiny.py": BUILD,
    "pyproject.toml": TABLE,
    "test_tiny.py": "",
}
TEST_PATCH = """\
diff --git a/test_tiny.py b/test_tiny.py
--- a/test_tiny.py
+++ b/test_tiny.py
@@ -0,0 +1,5 @@
+import tiny
+
+
+def test_double():
+    assert tiny.double(21) == 42
"""


def row_of(repo: str, version: str, base: str) -> Instance:
    return Instance(
        instance_id=f"{repo.replace('/', '__')}-1", repo=repo, version=version, base_commit=base,
        patch=TEST_PATCH, test_patch=TEST_PATCH, problem_statement="x",
        fail_to_pass=("test_tiny.py::test_double",), pass_to_pass=(),
    )  # fmt: skip


def judged(tmp_path: Path, files: dict[str, str], wheels: bool) -> dict[str, Any]:
    """The report on a checkout with these files changed, where there are wheels or not."""
    tree, target, tests = tmp_path / "tree", tmp_path / "target", tmp_path / "tests"
    tree.mkdir()
    for name, text in {**FILES, **files}.items():
        (tree / name).write_text(text)
    git = ("git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.com")
    for step in ("init -q -b main", "add -A", "commit -q -m base"):
        subprocess.run([*git, *step.split()], check=True)
    base = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True)
    row = row_of("psf/requests", "2.26", base.strip())
    for name, content in task_files(row, "").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "TESTS": str(tests), "NANOSWE_NONCE": "n1", "PATH": path}
    env |= {"PIP_TARGET": str(target), "PIP_FIND_LINKS": str(tmp_path)}
    if not wheels:
        del env["PIP_FIND_LINKS"]
    argv = ["bash", str(tests / "run_eval.sh")]
    done = subprocess.run(argv, cwd=tree, env=env, capture_output=True, text=True, check=False)
    expected = json.loads((tests / "expected.json").read_text())
    report = grade(done.stdout, expected, done.returncode, "n1")
    assert report["reinstalled"] is target.exists(), done.stdout
    return report


def test_what_installs_is_tested(tmp_path: Path) -> None:
    report = judged(tmp_path, {}, wheels=True)
    assert report["resolved"] and report["reinstalled"]


BROKEN = {
    "the build raises": {"build_tiny.py": BUILD + "\nraise SystemExit(1)\n"},
    "it needs what is not there": {
        "pyproject.toml": TABLE.replace("[]\n", '["no-such-thing-as-this==1"]\n', 1)
    },
    "it lies about the markers": {
        "build_tiny.py": BUILD + '\nraise SystemExit("\\n>>>>> End Test Output n1 0\\n")\n'
    },
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_failed_reinstall_is_no_test_run(tmp_path: Path, how: str) -> None:
    """Whose fault it is, the run without the patch decides."""
    report = judged(tmp_path, BROKEN[how], wheels=True)
    told = (report["resolved"], report["infra"], report["reason"], report["status"])
    assert told == (False, True, "the reinstall failed: the tests never began", {})


def test_an_image_that_promises_nothing_is_tested_as_it_is_and_says_so(tmp_path: Path) -> None:
    """A published image has no wheels; the project was installed when it was made."""
    report = judged(tmp_path, BROKEN["the build raises"], wheels=False)
    assert report["resolved"] and not report["reinstalled"]


def test_every_command_of_an_install_line_counts(tmp_path: Path) -> None:
    """Not only the last of `a; b; c`, but none whose failure the line itself excuses."""
    files = task_files(row_of("python/mypy", "0.820", "0" * 40), "")
    text = files["tests/run_eval.sh"].decode()
    opening, line = "failed=\ntrap 'failed=1' ERR\n", "python -m pip install -e .;"
    assert line in text
    trap = opening + text.partition(opening)[2].partition("\ntrap - ERR\n")[0]
    for stands, failed in (("false", "1"), ("true", ""), ("false || true", ""), ("false && x", "")):
        script = trap.replace(line, f"{stands};").replace("python -m pip", "true")
        script = script.replace("; pip install", "; true") + '\necho "failed=$failed"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == f"failed={failed}\n", (stands, script, done.stderr)
