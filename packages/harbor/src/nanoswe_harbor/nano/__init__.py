"""nano: a generated source of small real repositories, each with one bug, here as text.

In: a split, a count, a seed; the closed vocabulary of words.yaml. Out: NanoCase values (thousands a
second), each of (split, seed, index) alone; `build.py` makes repositories of them. A function name
belongs to one split by its hash, at any seed. Refuses (ValueError) an unknown split.
"""

import functools
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from nanoswe_harbor.families import facts

FACTS = facts("words")
SPLITS = ("train", "heldout")
HELDOUT_OF_256 = 96  # names whose hash byte is below this are held out


@dataclass(frozen=True)
class Bug:
    """One kind of bug: the issue's words, the fix, what stands there, the tempting wrong repair."""

    kind: str
    phrase: str
    good: str
    bug: str
    tempting: str
    family: str  # which argument values tell its operators apart: number, order or logic


NOUNS, VERBS, THINGS = (tuple(FACTS[kind].split()) for kind in ("nouns", "verbs", "things"))
BUGS = tuple(
    Bug(*(cell.strip() for cell in line.split("|"))) for line in FACTS["bugs"].splitlines()
)
SENTENCES = tuple(FACTS["sentences"])
WORDS = tuple(sorted({*NOUNS, *VERBS, *THINGS}))  # every word that a name is made of


@dataclass(frozen=True)
class Function:
    """One function `name(args)`; its correct body is `bug.good`."""

    name: str
    args: tuple[str, str]
    bug: Bug

    def source(self, expression: str) -> str:
        return f"def {self.name}({', '.join(self.args)}):\n    return {expression}\n"

    def expression(self, template: str) -> str:
        return template.format(a=self.args[0], b=self.args[1])


@dataclass(frozen=True)
class NanoCase:
    """One repository with one bug. `good`, `bug`, `tempting` are expressions."""

    key: str  # split, seed and index: what all else comes from
    instance_id: str
    name: str  # the function with the bug
    kind: str
    file_name: str
    file_text: str  # with the bug
    issue: str
    good: str
    bug: str
    tempting: str
    functions: tuple[Function, ...]  # of file_name, in order; one of them is `name`
    other_module: str  # "" where the repository has one module
    other_functions: tuple[Function, ...]
    target: Function  # the one called `name`


def cases(split: str, count: int, seed: int) -> Iterator[NanoCase]:
    """The first `count` cases of a split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; take one of {', '.join(SPLITS)}")
    for index in range(count):
        yield _case(split, seed, index)


def fix_command(case: NanoCase, expression: str) -> str:
    """The shell command that makes the buggy function return `expression`."""
    return f"sed -i '/def {case.name}/,/return/s|return .*|return {expression}|' {case.file_name}"


def module_text(functions: tuple[Function, ...], name: str, expression: str) -> str:
    """A module's text, where function `name` returns `expression` and the others are correct."""
    return "\n\n".join(
        f.source(expression if f.name == name else f.expression(f.bug.good)) for f in functions
    )


@functools.cache
def names(split: str) -> tuple[str, ...]:
    """Every function name of a split, sorted."""
    every = sorted(f"{verb}_{thing}" for verb in VERBS for thing in THINGS)
    heldout = {n for n in every if hashlib.sha256(n.encode()).digest()[0] < HELDOUT_OF_256}
    return tuple(name for name in every if (name in heldout) == (split == "heldout"))


def _case(split: str, seed: int, index: int) -> NanoCase:
    key = f"{split}/{seed}/{index}"
    rng = random.Random(key)
    module, other_module, *words = rng.sample(NOUNS, 14)
    pool = rng.sample(names(split), 5)
    arguments = [(words[2 * i], words[2 * i + 1]) for i in range(5)]
    functions = [Function(pool[i], arguments[i], rng.choice(BUGS)) for i in range(5)]
    # Kinds go round, so that any run of cases is balanced.
    target = Function(pool[0], arguments[0], BUGS[index % len(BUGS)])
    own = [target, *functions[1 : rng.choice((2, 3))]]
    rng.shuffle(own)
    others = tuple(functions[3 : rng.choice((3, 4, 5))])
    file_name = f"{module}.py"
    phrase, bug = target.expression(target.bug.phrase), target.expression(target.bug.bug)
    a, b = target.args
    issue = rng.choice(SENTENCES).format(name=target.name, a=a, b=b, file=file_name, phrase=phrase)
    return NanoCase(
        key=key,
        instance_id=f"nano__{split}-{index:04d}",
        name=target.name,
        kind=target.bug.kind,
        file_name=file_name,
        file_text=module_text(tuple(own), target.name, bug),
        issue=issue,
        good=target.expression(target.bug.good),
        bug=bug,
        tempting=target.expression(target.bug.tempting),
        functions=tuple(own),
        other_module=other_module if others else "",
        other_functions=others,
        target=target,
    )
