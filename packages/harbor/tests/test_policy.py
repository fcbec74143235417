"""policy: what is dropped of a patch, as a function and as the program in a task; and record.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoswe_harbor.convert import render
from nanoswe_harbor.grader import policy
from nanoswe_harbor.grader.policy import police, sections

TESTS, GOLD = ["tests/unit/test_a.py", "test_top.py"], ["src/a.py", "setup.cfg"]


def change(path: str, mode: str = "") -> str:
    return f"diff --git a/{path} b/{path}\n{mode}--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("path", "new", "kept"),
    [
        ("src/a.py", False, True),
        ("setup.cfg", False, True),  # the gold patch touches it
        ("pkg/setup.cfg", False, False),
        ("pyproject.toml", False, False),
        ("tox.ini", True, False),
        ("a/b/conftest.py", True, False),
        ("x.pth", True, False),
        ("lib/sitecustomize.py", True, False),
        ("tests/unit/test_a.py", False, False),
        ("tests/unit/new.py", True, False),
        ("tests/other/new.py", True, True),
        ("test_top.py", False, False),
        ("top_level.py", True, True),
        ("pytest.py", True, False),
        ("pip.py", True, False),
        ("code/__init__.py", True, True),
        ("packaging/new.py", True, True),  # no module of the name
        ("json/__init__.py", True, False),
        ("json/__init__.py", False, True),  # the project's own
        ("src/json.py", True, True),
        ("test/__init__.py", True, True),
    ],
)
def test_what_is_dropped(path: str, new: bool, kept: bool) -> None:
    patch = change("src/a.py") + change(path, "new file mode 100644\n" if new else "")
    text, dropped = police(patch, TESTS, GOLD)
    assert (text == patch) is kept and dropped == ([] if kept else [path])
    assert kept or text == change("src/a.py")


@pytest.mark.parametrize(
    "text",
    [
        # git apply reads a plain section anywhere outside hunks, and names without prefixes
        change("src/a.py") + "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n",
        change("src/a.py") + "garbage\n",
        change("src/a.py").replace("a/src", "i/src").replace("b/src", "w/src"),
        change("src/a.py").replace("+++ b/src/a.py", "+++ b/conftest.py"),
        change("src/a.py").replace("-1 +1", "-1 +1,9"),
        change("src/a.py").replace("@@\n", "@@\n\n"),
        change("src/../conftest.py"),
        change("src//conftest.py"),
        change("src/a.py", "rename from conftest.py\n"),
        "diff --git a/x b/x\nGIT binary patch\nliteral 1\nx\n\ndelta 1\nx\n\nliteral 1\nx\n\n",
        "x\n" + change("src/a.py"),
    ],
)
def test_what_git_does_not_write_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="of a git diff"):
        police(text, TESTS, GOLD)


def test_names_are_as_git_reads_them() -> None:
    quoted = change("x").replace("a/x", '"a/conf\\164est.py"').replace("b/x", '"b/conf\\164est.py"')
    spaced = change("b c.py").replace("b c.py\n@@", "b c.py\t\n@@")
    assert police(quoted + spaced, TESTS, GOLD) == (spaced, ["conftest.py"])


def test_real_diffs_are_understood(tmp_path: Path) -> None:
    """Of every kind that the extraction can write."""

    def run(*argv: str) -> str:
        done = subprocess.run(["git", *argv], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode("utf-8", "surrogateescape")

    run("init", "-q")
    names = ["a b.py", "tab\t.py", "\u00e9\udcff.py", "gone", "bin", "mode", 'quo"te', "old"]
    for name in names:
        (tmp_path / name).write_bytes(b"1\n2\n3")
    run("add", "-A")
    run("-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x")
    for name in names:
        (tmp_path / name).write_bytes(b"1\n2\n4\n\r\n--- a\n+++ b\n")
    (tmp_path / "gone").unlink()
    (tmp_path / "bin").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "mode").chmod(0o755)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "link").symlink_to("x")
    run("add", "-A")
    for quote in ("true", "false"):
        config = ("-c", f"core.quotePath={quote}")
        patch = run(*config, "diff", "--cached", "--binary", "--no-renames")
        found = sections(patch)
        assert "".join(text for _, text in found) == patch
        assert sorted(path for path, _ in found) == sorted([*names, "empty", "link"])


@given(st.lists(st.sampled_from(["src/a.py", "conftest.py", "b c.txt"]), max_size=6), st.booleans())
def test_sections_are_the_patch(paths: list[str], newline: bool) -> None:
    patch = "".join(map(change, paths)).removesuffix("" if newline else "\n")
    assert "".join(text for _, text in sections(patch)) == patch
    assert [path for path, _ in sections(patch)] == paths


def test_the_program(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_bytes(Path(str(policy.__file__)).read_bytes())
    expected = {"test_files": TESTS, "gold_files": GOLD}
    (tmp_path / "expected.json").write_text(json.dumps(expected))

    def run(patch: bytes) -> tuple[int, bytes]:
        (tmp_path / "in").write_bytes(patch)
        argv = [sys.executable, "-S", str(tmp_path / "policy.py"), "in", "out"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False)
        return done.returncode, (tmp_path / "out").read_bytes()

    odd = change("src/a.py").encode().replace(b"+b", b"+\xff\r\x00")
    assert run(odd) == (0, odd) and run(b"") == (0, b"")
    assert run(odd + change("conftest.py").encode()) == (1, odd)
    assert run(odd + b"garbage\n")[0] == 3
    (tmp_path / "expected.json").unlink()
    assert run(odd)[0] == 2


def test_the_recorder_changes_nothing_and_records_all(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text('''\
import unittest


class T(unittest.TestCase):
    def test_a(self):
        pass

    def test_b(self):
        """The docstring of b."""
        self.fail()

    def test_c(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertEqual(i, 0)

    @unittest.skip("x")
    def test_d(self):
        pass

    @unittest.expectedFailure
    def test_e(self):
        1 / 0
''')
    recorder = tmp_path / "folder/record.py"
    recorder.parent.mkdir()
    recorder.write_text(render("record.py.j2", {}))
    (tmp_path / "run.py").write_text("import unittest\nunittest.main('test_x')\n")
    for tail in (["-m", "unittest", "-v", "test_x"], ["run.py", "-v"]):
        plain = [sys.executable, *tail]
        watched = [sys.executable, str(recorder), "results", *tail]
        runs = [
            subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
            for argv in (plain, watched)
        ]
        assert runs[0].returncode == runs[1].returncode == 1
        texts = [run.stderr.split("Ran 5 tests")[0] for run in runs]
        assert texts[0] == texts[1] and "FAIL: test_b" in texts[0]
        lines = (tmp_path / "results").read_text().splitlines()
        words = {line.split("(")[0].strip(): line for line in lines}
        assert set(words) == {
            "PASSED test_a",
            "FAILED test_b",
            "FAILED The docstring of b.",
            "FAILED test_c",
            "SKIPPED test_d",
            "XFAIL test_e",
        }
        (tmp_path / "results").unlink()
