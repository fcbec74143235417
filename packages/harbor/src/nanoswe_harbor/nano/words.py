"""The closed vocabulary of the nano source: names, bug kinds, sentences, from words.yaml."""

from dataclasses import dataclass
from importlib import resources

import yaml

FACTS = yaml.safe_load((resources.files(__package__) / "words.yaml").read_text(encoding="utf-8"))


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
