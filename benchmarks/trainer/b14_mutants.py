"""B14: the share of small faults in algo.py, sched.py and pack.py that the fast tests notice: an
operator or a comparison turned, a number moved by one, a branch always or never taken, min for max;
one fault a run. Messages, annotations and docstrings are left alone. Each run is a fork of one
process that has torch and pytest in it already.

    python benchmarks/trainer/b14_mutants.py --out benchmarks/trainer/b14.json
"""

import argparse
import ast
import copy
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import hypothesis
import pytest
import torch
from result import tell
from torch.distributed import fsdp  # noqa: F401  what the worker imports: once, before any fork

TRAINER = Path(__file__).parents[2] / "packages" / "trainer"
LIMIT_SEC = 180
TESTS = {
    "algo": ("test_algo.py", "test_algo_laws.py", "test_data.py"),
    "sched": ("test_sched.py",),
    "pack": ("test_algo.py", "test_pack.py", "test_model.py"),
}
TURNED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "any": "all", "all": "any"}


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that may hold a fault, in order."""
    hints = ("annotation", "returns", "decorator_list")
    found = (getattr(owner, hint, None) for owner in ast.walk(tree) for hint in hints)
    spared = [node for part in found for node in (part if isinstance(part, list) else [part])]
    for node in ast.iter_child_nodes(tree):
        if node not in spared and not isinstance(node, ast.JoinedStr | ast.Raise):
            yield node
            yield from places(node)


def faults(node: ast.AST) -> Iterator[str]:
    """What may be done to a node, which is changed while the name of it is out."""

    def turn(owner: ast.AST, field: str, value: object, name: str) -> Iterator[str]:
        before = getattr(owner, field)
        setattr(owner, field, value)
        yield name
        setattr(owner, field, before)

    match node:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in TURNED:
            other = TURNED[type(node.op)]
            yield from turn(node, "op", other(), f"{type(node.op).__name__} to {other.__name__}")
        case ast.Compare():
            for i, op in enumerate(node.ops):
                ops = [*node.ops[:i], TURNED[type(op)](), *node.ops[i + 1 :]]
                yield from turn(node, "ops", ops, f"{type(op).__name__} to {type(ops[i]).__name__}")
        case ast.Constant(value=bool(value)):
            yield from turn(node, "value", not value, f"{value} to {not value}")
        case ast.Constant(value=int(value) | float(value)):
            yield from turn(node, "value", value + 1, f"{value} to {value + 1}")
        case ast.If() | ast.IfExp():
            for value in (True, False):
                yield from turn(node, "test", ast.Constant(value), f"if {value}")
        case ast.UnaryOp(op=ast.USub() | ast.Invert()):
            plus = ast.UnaryOp(ast.UAdd(), node.operand)
            yield from turn(node, "op", plus.op, f"{type(node.op).__name__} dropped")
        case ast.Name(id=name) if name in NAMES:
            yield from turn(node, "id", NAMES[name], f"{name} to {NAMES[name]}")
        case ast.Attribute(attr=name) if name in NAMES:
            yield from turn(node, "attr", NAMES[name], f"{name} to {NAMES[name]}")


def mutants(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, what was done, the module's text)"""
    tree = ast.parse(path.read_text())
    for node in places(tree):
        for name in faults(node):
            yield node.lineno, name, ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))  # type: ignore[attr-defined]


class Finder:
    """Imports the module from the text given."""

    def __init__(self, module: str, path: Path, text: str):
        self.module, self.path, self.text = module, path, text

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        text = self.text

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> object:
                return compile(text, self.path, "exec")

        if name != self.module:
            return None
        return spec_from_file_location(name, self.path, loader=Loader(name, str(self.path)))


def noticed(module: str, path: Path, text: str, tests: list[str]) -> bool:
    """Whether the tests fail, or do not end, on this text."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_SEC)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1), os.dup2(silent, 2)
        sys.meta_path.insert(0, Finder(module, path, text))  # type: ignore[arg-type]
        code = 1
        with suppress(BaseException):
            # what is imported before the fork cannot be rewritten, and warns
            loaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *loaded, *tests])
        os._exit(int(code))
    _, status = os.waitpid(child, 0)
    return status != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="+", default=list(TESTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in options.modules:
        path = TRAINER / f"src/nanoswe_trainer/{name}.py"
        tests = [str(TRAINER / "tests" / test) for test in TESTS[name]]
        module, whole = f"nanoswe_trainer.{name}", path.read_text()
        assert not noticed(module, path, ast.unparse(ast.parse(whole)), tests), "the tests fail"
        every = [*mutants(path)]
        alive = []
        for line, what, text in every:
            if not noticed(module, path, text, tests):
                alive.append(f"{name}.py:{line} {what}: {whole.splitlines()[line - 1].strip()}")
                sys.stderr.write(f"{alive[-1]}\n")
        found[name] = {"faults": len(every), "noticed": len(every) - len(alive), "alive": alive}
    faults_, seen = (sum(f[key] for f in found.values()) for key in ("faults", "noticed"))
    tell({"score": round(seen / faults_, 3), "faults": faults_, "modules": found,
          "hypothesis": hypothesis.__version__}, options.out)  # fmt: skip


if __name__ == "__main__":
    main()
