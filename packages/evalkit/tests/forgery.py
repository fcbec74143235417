"""One small bug as a task of each of three test frameworks, by harbor's own templates."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from nanoswe_harbor.checkout import git
from nanoswe_harbor.convert import convert
from nanoswe_harbor.instance import Instance
from nanoswe_harbor.task import Task, load_tasks

CALC = "def add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n"
UNITTEST = """import unittest

import calc


class {name}(unittest.TestCase):
"""
METHOD = "    def test_{0}(self):\n        self.assertEqual(calc.{0}(2, 3), {1})\n"
FUNCTION = "def test_{0}():\n    assert calc.{0}(2, 3) == {1}\n"
RUNTESTS = """#!/usr/bin/env python3
import sys
import unittest
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path[:0] = [str(here), str(here.parent)]
labels = [a for a in sys.argv[1:] if not a.startswith("-") and not a.isdigit()]
suite = unittest.defaultTestLoader.loadTestsFromNames(labels)
sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
"""
REPOS = {
    "unittest": ("nano/forgery", "1", "tests/test_calc.py", "tests/test_more.py"),
    "pytest": ("pallets/flask", "2.3", "tests/test_calc.py", "tests/test_more.py"),
    "django": ("django/django", "4.0", "tests/sums/tests.py", "tests/sums/test_more.py"),
}


def build(folder: Path) -> dict[str, Task]:
    """Framework → its task; the mirror lies beside the tasks."""
    rows = [_row(framework, folder) for framework in REPOS]
    convert(rows, folder / "tasks", "forgery")
    tasks = {task.task_id.partition("-")[0]: task for task in load_tasks(folder / "tasks")}
    # pytest comes with the hidden tests, as an image would bring it: out of the agent's reach.
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        to = tasks["pytest"].path / "tests" / "site" / name
        shutil.copytree(Path(spec.origin).parent, to, ignore=_unused)
    installed = Path(spec.origin).parents[1]
    shutil.copy(installed / "py.py", to.parent)
    (pluggy,) = installed.glob("pluggy-*.dist-info")
    shutil.copytree(pluggy, to.parent / pluggy.name)
    script = tasks["pytest"].path / "tests" / "run_eval.sh"
    run = 'env PYTHONPATH="$tests/site" python3 -m pytest -p no:cacheprovider -rA'
    text = script.read_text()
    assert text.count("pytest -rA") == 1
    script.write_text(text.replace("pytest -rA", run))
    return tasks


def _unused(folder: str, names: list[str]) -> set[str]:
    """Most of pygments is lexers, of which pytest uses two."""
    keep = {"__init__.py", "_mapping.py", "diff.py", "python.py"}
    lexers = Path(folder).name == "lexers"
    return {name for name in names if name == "__pycache__" or (lexers and name not in keep)}


def file_text(framework: str, path: str, functions: dict[str, int], fails: bool = True) -> str:
    template = FUNCTION if framework == "pytest" else METHOD
    body = "\n".join(template.format(name, value) for name, value in functions.items())
    if not fails:
        body = body.replace("assertEqual(", "assertTrue(").replace(
            "assert calc", "assert 1 or calc"
        )
    head = "import calc\n\n\n" if framework == "pytest" else UNITTEST.format(name=_class(path))
    return head + body


def _class(path: str) -> str:
    return "TestMore" if "more" in path else "TestCalc"


def identity(framework: str, path: str, name: str) -> str:
    """The test's id, as its runner prints it."""
    if framework == "pytest":
        return f"{path}::test_{name}"
    module = path.removesuffix(".py").removeprefix("tests/" if framework == "django" else "")
    dotted = f"{module.replace('/', '.')}.{_class(path)}"
    return f"test_{name} ({dotted}.test_{name})" if sys.version_info >= (3, 11) else ""


def ok_lines(framework: str) -> str:
    """What a run in which all passes prints."""
    *_, test, new = REPOS[framework]
    ids = [identity(framework, test, "add"), identity(framework, test, "mul")]
    ids.append(identity(framework, new, "more"))
    return "\n".join(f"PASSED {i}" if framework == "pytest" else f"{i} ... ok" for i in ids)


def _row(framework: str, folder: Path) -> Instance:
    repo, version, test, new = REPOS[framework]
    work = folder / "work" / framework
    files = {"calc.py": CALC, test: file_text(framework, test, {"mul": 6}), "README.md": "calc\n"}
    if framework == "django":
        files |= {"tests/runtests.py": RUNTESTS, "tests/sums/__init__.py": ""}
    elif framework == "unittest":
        files["tests/__init__.py"] = ""
    else:
        files["tests/conftest.py"] = "import sys\n\nsys.path.insert(0, '.')\n"
    work.mkdir(parents=True)
    _git(work, "init", "-q", "-b", "main")
    base = _commit(work, files)
    (work / "calc.py").write_text(CALC.replace("a - b", "a + b"))
    patch = _git(work, "diff")
    _git(work, "checkout", "-q", ".")
    (work / test).write_text(file_text(framework, test, {"mul": 6, "add": 5}))
    more = file_text(framework, new, {"add": 5}).replace("test_add", "test_more")
    (work / new).write_text(more)
    _git(work, "add", "-A")
    test_patch = _git(work, "diff", "--cached")
    _commit(work, {"calc.py": CALC.replace("a - b", "a + b")})  # the future, which must not show
    mirror = folder / "mirror" / f"{repo}.git"
    shutil.copytree(work / ".git", mirror)
    _git(mirror, "config", "core.bare", "true")
    return Instance(
        instance_id=f"{framework}-1",
        repo=repo,
        base_commit=base,
        version=version,
        patch=patch,
        test_patch=test_patch,
        problem_statement="calc.add must return the sum.",
        fail_to_pass=(identity(framework, test, "add"), identity(framework, new, "more")),
        pass_to_pass=(identity(framework, test, "mul"),),
    )


def _git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    return git(folder, *who, *args).decode()


def _commit(work: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    if (work / "tests/runtests.py").exists():
        (work / "tests/runtests.py").chmod(0o755)
    _git(work, "add", "-A")
    _git(work, "commit", "-q", "-m", "x")
    return _git(work, "rev-parse", "HEAD").strip()
