"""B13: lines that one reads to understand a step: the files of the algorithm, the schedule and the
loop, whole, with the data types that they name; then with every class of this project that they
name, worker and engines too; the whole package; and, where they are installed, TRL's GRPO trainer
with the trainer that it builds on. Every line counts, comments and blank ones too.

    python benchmarks/trainer/b13_lines.py --out benchmarks/trainer/b13.json
"""

import argparse
import ast
from importlib.util import find_spec
from pathlib import Path

from result import tell

PATH = ("nanoswe_trainer.algo", "nanoswe_trainer.sched", "nanoswe_trainer.loop_rl")
PEERS = {
    "trl": ("trl.trainer.grpo_trainer", "trl.trainer.grpo_config", "trl.trainer.base_trainer"),
    "transformers": ("transformers.trainer", "transformers.training_args"),
}
DATA = {"Section", "Recipe", "StrEnum"}  # bases of what is data, as dataclasses are


def file_of(module: str) -> Path:
    spec = find_spec(module)
    assert spec and spec.origin, module
    return Path(spec.origin)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def named_classes(module: str) -> dict[tuple[str, bool], int]:
    """Lines of each class of ours that the module imports, and whether it is data."""
    found = {}
    for node in ast.parse(file_of(module).read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("nanoswe_"):
            continue
        wanted = {alias.name for alias in node.names}
        for made in ast.parse(file_of(str(node.module)).read_text()).body:
            if isinstance(made, ast.ClassDef) and made.name in wanted and node.module not in PATH:
                size = (made.end_lineno or 0) - made.lineno + 1
                data = bool(made.decorator_list or {ast.unparse(b) for b in made.bases} & DATA)
                found[f"{node.module}.{made.name}", data] = size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = {module: lines(file_of(module)) for module in PATH}
    classes = {name: n for module in PATH for name, n in named_classes(module).items()}
    package = file_of("nanoswe_trainer").parent
    peers = {module: lines(file_of(module)) for dist, modules in PEERS.items() if find_spec(dist)
             for module in modules}  # fmt: skip
    tell({
        "path": sum(files.values()) + sum(n for (_, data), n in classes.items() if data),
        "path_and_every_class": sum(files.values()) + sum(classes.values()), "files": files,
        "classes": {name: n for (name, _), n in classes.items()},
        "package": sum(map(lines, package.rglob("*.py"))), "peer": sum(peers.values()),
        "peer_files": peers,
    }, options.out)  # fmt: skip


if __name__ == "__main__":
    main()
