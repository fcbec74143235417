"""What a session is: a pure function of its records.

In: records, one at a time, live or read back from a log. Out: the tree of turns, the notes, whether
it is sealed. Nothing else changes any of these. Refuses (LogError) records that fit no session.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt

from nanoswe_proxy import tree
from nanoswe_proxy.errors import LogError
from nanoswe_proxy.log import Record


@dataclass(frozen=True)
class Policy:
    """What the session fixes for all of its calls, whatever the agent asks for."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    trial_id: str
    try_: NonNegativeInt
    seed_key: str
    temperature: NonNegativeFloat
    max_tokens: PositiveInt


class State:
    """Made by its first record."""

    cap: str
    policy: Policy
    max_context: int

    def __init__(self) -> None:
        self.roots: list[tree.Context] = []
        self.prompts: dict[str, tree.Context] = {}  # of completions, by `tree.prompt_key`
        self.nodes: list[tree.Context | tree.Generation] = []
        self.notes: dict[str, Any] = {}
        self.calls: dict[int, dict[str, Any]] = {}  # that a provider answers
        self.sealed = False
        self.longest = 0  # messages in the longest request so far
        self._asked: dict = {}
        self._runs: list[list[int]] = []

    def generations(self) -> Iterable[tree.Generation]:
        return (n for n in self.nodes if isinstance(n, tree.Generation))

    def apply(self, fields: dict, blob: bytes) -> None:
        """The only place where the state changes, live and on replay."""
        if (fields["type"] == "open") == hasattr(self, "cap"):
            raise LogError("a session is opened by its first record, and by no other")
        match fields["type"]:
            case "open":
                self.cap, self.policy = fields["cap"], Policy(**fields["policy"])
                self.max_context = fields["max_context"]
            case "context":
                self._apply_context(fields, blob)
            case "intent":
                asked = fields["requested"]
                self._asked = self._asked if asked == self._asked else asked  # one for many turns
                facts = (self._asked, fields["created"], fields["digest"])
                for choice, parent in enumerate(self.nodes[i] for i in fields["parents"]):
                    made = tree.Generation(len(self.nodes), parent, *facts, choice)
                    parent.children += (made,)
                    self.nodes.append(made)
                self.longest = max(self.longest, fields["messages"])
            case "end":
                self._apply_end(self.nodes[fields["node"]], fields, blob)
            case "delivery":
                node = self.nodes[fields["node"]]
                node.delivery, node.digest = fields["state"], ""
            case "note":
                self.notes |= fields["notes"]
            case "call":
                self.calls[fields["number"]] = self.calls.get(fields["number"], {}) | fields
            case "seal":
                self.sealed = True
            case other:
                raise LogError(f"the log has a record of type {other!r}: it is of a newer version")

    def _apply_context(self, fields: dict, blob: bytes) -> None:
        parent = None if fields["parent"] is None else self.nodes[fields["parent"]]
        n = 4 * fields["n"]
        tools = parent.parent.tools if parent else fields["tools"]
        made = (fields["messages"], tools, array("I", blob[:n])[:], blob[n:], fields["fork"])
        context = tree.Context(len(self.nodes), parent, *made)
        self.nodes.append(context)
        if parent:
            parent.children += (context,)
        elif context.raw:
            self.prompts[tree.prompt_key(context.ids)] = context
        else:
            self.roots.append(context)

    def _apply_end(self, node: tree.Generation, fields: dict, blob: bytes) -> None:
        n = 4 * fields["n"]
        node.ids, node.logprobs = array("I", blob[:n])[:], array("f", blob[n:])[:]  # no spare room
        self._runs = runs if (runs := fields["versions"]) != self._runs else self._runs
        node.versions, node.stop, node.delivery = self._runs, fields["stop"], "aborted"
        if view := fields.get("view"):
            node.view, node.delivery = view, "committed"
            node.finish_reason, node.parse = fields["finish"], fields["parse"]


def replay(records: Sequence[Record]) -> State:
    """The state that a log describes, as far as it goes."""
    if not records:
        raise LogError("the log ends before its session was opened")
    state = State()
    for fields, blob in records:
        state.apply(fields, blob)
    return state
