"""nano: a generated source of small real repositories, each with one bug.

In: a split name, a count and a seed. Out: NanoCase values (pure, thousands a second), and, by
`build`, bare repositories with their Instances. The same seed gives the same bytes.
"""

from nanoswe_harbor.nano.build import build
from nanoswe_harbor.nano.cases import SPLITS, Function, NanoCase, cases, fix_command
from nanoswe_harbor.nano.words import BUGS, NOUNS, SENTENCES, THINGS, VERBS, WORDS, Bug

__all__ = ["BUGS", "NOUNS", "SENTENCES", "SPLITS", "THINGS", "VERBS", "WORDS"]
__all__ += ["Bug", "Function", "NanoCase", "build", "cases", "fix_command"]
