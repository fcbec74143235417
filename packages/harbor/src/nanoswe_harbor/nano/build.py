"""A nano case to a real repository: a bare repository and an Instance.

In: a case and a mirror folder. Out: `mirror/nano/<name>.git` of three commits (start, bug = base,
and the fix, which `main` and a tag name), and the row; always the same bytes. Refuses as git does.
"""

import difflib
import random
from collections.abc import Iterable
from pathlib import Path

from nanoswe_harbor.checkout import git
from nanoswe_harbor.instance import Instance
from nanoswe_harbor.nano import Function, NanoCase, module_text

AUTHOR = "nano <nano@example.com>"
FIRST_COMMIT = 1_704_067_200  # 2024-01-01T00:00:00Z
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"
POINTS = 2  # hidden test methods of the buggy function


def build(case: NanoCase, mirror: Path) -> Instance:
    """Create the bare repository of a case below `mirror`."""
    repo, module = case.instance_id.replace("__", "/"), case.file_name.removesuffix(".py")
    test_file = f"tests/test_{module}.py"
    others = tuple(f for f in case.functions if f.name != case.name)
    visible = _methods(case, others, methods=1)
    hidden = _methods(case, (case.target,), methods=POINTS)
    first = {
        "README.md": f"# {repo.split('/')[1]}\n\nRun the tests: `python3 -m unittest`.\n",
        case.file_name: module_text(others, "", ""),
        "tests/__init__.py": "",
        test_file: _test_module(module, visible),
    }
    if case.other_functions:
        other = _methods(case, case.other_functions, methods=1, module=case.other_module)
        first[f"{case.other_module}.py"] = module_text(case.other_functions, "", "")
        first[f"tests/test_{case.other_module}.py"] = _test_module(case.other_module, other)
    bug = {case.file_name: case.file_text}
    fix = {
        case.file_name: module_text(case.functions, case.name, case.good),
        test_file: _test_module(module, visible | hidden),
    }
    commits = (("Start", first), (f"Add {case.name}", bug), (f"Fix {case.name}", fix))
    base_commit = _import(mirror / f"{repo}.git", commits)
    test_class = f"tests.test_{module}.Test{module.capitalize()}"
    return Instance(
        instance_id=case.instance_id,
        repo=repo,
        base_commit=base_commit,
        patch=_diff(case.file_name, case.file_text, fix[case.file_name]),
        test_patch=_diff(test_file, first[test_file], fix[test_file]),
        problem_statement=case.issue,
        fail_to_pass=tuple(f"{method} ({test_class}.{method})" for method in hidden),
        pass_to_pass=tuple(f"{method} ({test_class}.{method})" for method in visible),
        version="1",
        created_at="2024-01-01T00:00:00Z",
    )


def _methods(
    case: NanoCase, functions: tuple[Function, ...], methods: int, module: str = ""
) -> dict[str, str]:
    """Method name → its text. Each method tells the correct body from the others of its family."""
    texts = {}
    module = module or case.file_name.removesuffix(".py")
    for function in functions:
        rng = random.Random(f"{case.key}/{function.name}")
        for number in range(1, methods + 1):
            lines = []
            for a, b in _points(function.bug.family, rng):
                call, value = f"{module}.{function.name}({a}, {b})", _value(function.bug.good, a, b)
                lines.append(f"        self.assertEqual({call}, {value})\n")
            suffix = f"_{number}" if methods > 1 else ""
            method = f"test_{function.name}{suffix}"
            texts[method] = f"    def {method}(self):\n{''.join(lines)}"
    return texts


def _points(family: str, rng: random.Random) -> list[tuple[int | bool, int | bool]]:
    """Arguments at which a family's expressions differ: at each (number) or over all (others)."""
    match family:
        case "number":
            b = rng.randrange(3, 9)
            return [(b * rng.randrange(2, 5) + rng.randrange(1, b - 1), b)]
        case "order":
            a, step = rng.randrange(3, 50), rng.randrange(1, 9)
            return [(a, a + step), (a + step, a), (a, a)]
        case _:
            return rng.sample([(a, b) for a in (True, False) for b in (True, False)], 4)


def _value(template: str, a: int, b: int) -> object:
    # The templates are constants of words.py, the arguments our own numbers.
    return eval(template.format(a="a", b="b"), {"a": a, "b": b, "max": max, "min": min})


def _test_module(module: str, methods: dict[str, str]) -> str:
    head = f"import unittest\n\nimport {module}\n\n\nclass Test{module.capitalize()}"
    return f"{head}(unittest.TestCase):\n" + "\n".join(methods.values())


def _diff(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def _import(repository: Path, commits: Iterable[tuple[str, dict[str, str]]]) -> str:
    """Write a bare repository by one `git fast-import`; the id of the second commit."""
    (repository / "objects").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "HEAD").write_text("ref: refs/heads/main\n")
    (repository / "config").write_text(CONFIG)
    stream = []
    for mark, (message, files) in enumerate(commits, start=1):
        when = f"{AUTHOR} {FIRST_COMMIT + 3600 * mark} +0000"
        stream.append(f"commit refs/heads/main\nmark :{mark}\nauthor {when}\ncommitter {when}\n")
        stream.append(_data(message + "\n"))
        stream += [f"M 100644 inline {path}\n{_data(text)}" for path, text in files.items()]
    stream.append("reset refs/tags/v2\nfrom :3\n\nget-mark :2\n")
    command = ("-c", "fastimport.unpackLimit=1", "fast-import", "--quiet")
    answer = git(repository, *command, stdin="".join(stream).encode())
    return answer.decode().strip()


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"
