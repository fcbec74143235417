"""The closed vocabulary of the nano source: names, bug kinds, sentences.

Nothing comes in; constants go out. Every word is lower-case ASCII of 3 to 9 letters and no Python
keyword, builtin or standard module (a test holds it). {a} and {b} stand for the two arguments.
"""

from dataclasses import dataclass

# Modules and arguments. Few words, so that a small model has seen each of them often.
NOUNS = tuple(
    """
    stock price left right width depth height weight speed total limit level count batch order
    start stop upper lower first second front river stone cloud grain metal paper glass wheel
    motor panel frame track field house
    """.split()
)
# Functions are named verb_thing.
VERBS = tuple(
    """
    merge scan check join pick find blend weigh match score trail build shift probe mark plan
    """.split()
)
THINGS = tuple(
    """
    rate pair item cost load span gap share value block group route layer cycle phase quota fleet
    stack lane crop harvest tide mass fund
    """.split()
)


@dataclass(frozen=True)
class Bug:
    """One kind of bug: the issue's words, the fix, what stands there, the tempting wrong repair."""

    kind: str
    phrase: str
    good: str
    bug: str
    tempting: str
    family: str  # which argument values tell its operators apart: number, order or logic


BUGS = tuple(
    Bug(*(cell.strip() for cell in line.split("|")))
    for line in """
  sum        | the sum of {a} and {b}          | {a} + {b}     | {a} - {b}     | {a} * {b}  | number
  difference | the difference of {a} and {b}   | {a} - {b}     | {a} + {b}     | {a} % {b}  | number
  product    | the product of {a} and {b}      | {a} * {b}     | {a} + {b}     | {a} - {b}  | number
  remainder  | the remainder of {a} by {b}     | {a} % {b}     | {a} * {b}     | {a} - {b}  | number
  larger     | the larger of {a} and {b}       | max({a}, {b}) | min({a}, {b}) | {a} + {b}  | number
  smaller    | the smaller of {a} and {b}      | min({a}, {b}) | max({a}, {b}) | {a} - {b}  | number
  least      | whether {a} is at least {b}     | {a} >= {b}    | {a} <= {b}    | {a} > {b}  | order
  more       | whether {a} is more than {b}    | {a} > {b}     | {a} < {b}     | {a} >= {b} | order
  most       | whether {a} is at most {b}      | {a} <= {b}    | {a} >= {b}    | {a} < {b}  | order
  less       | whether {a} is less than {b}    | {a} < {b}     | {a} > {b}     | {a} <= {b} | order
  same       | whether {a} is the same as {b}  | {a} == {b}    | {a} != {b}    | {a} >= {b} | order
  different  | whether {a} differs from {b}    | {a} != {b}    | {a} == {b}    | {a} > {b}  | order
  both       | whether both {a} and {b} hold   | {a} and {b}   | {a} or {b}    | {a} == {b} | logic
  either     | whether either {a} or {b} holds | {a} or {b}    | {a} and {b}   | {a} != {b} | logic
    """.strip().splitlines()
)

SENTENCES = (
    "{name}({a}, {b}) in {file} must return {phrase}.",
    "{name}({a}, {b}) in {file} should give {phrase}.",
    "In {file}, {name}({a}, {b}) should return {phrase}. It does not.",
)

# Every word that a name is made of.
WORDS = tuple(sorted({*NOUNS, *VERBS, *THINGS}))
