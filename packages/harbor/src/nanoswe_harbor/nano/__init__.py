"""nano: a generated source of small real repositories, each with one bug.

In: a split name, a count and a seed. Out: NanoCase values (pure, thousands a second), and, by
`build`, bare repositories with their Instances. The same seed gives the same bytes.
"""

from nanoswe_harbor.nano.build import build
from nanoswe_harbor.nano.cases import BUGS, SENTENCES, SPLITS, WORDS, NanoCase, cases, fix_command

__all__ = ["BUGS", "SENTENCES", "SPLITS", "WORDS", "NanoCase", "build", "cases", "fix_command"]
