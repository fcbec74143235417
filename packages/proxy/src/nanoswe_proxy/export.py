"""A session's nodes in, a Trajectory out: a row per surviving leaf, each sampled token owned once.

A generation is trained in the deepest leaf that contains it (ties: the first), and is context in
the others. Masked with a reason, and counted: `aborted` (cut off by a fault, a cancel or the seal)
and `undelivered` (the agent never got the reply). A call that a crash swallowed makes the
trajectory incomplete. What a `provider` answered is masked whole: its tokens are not known.
"""

import math
from collections import Counter

from nanoswe_proxy import tree
from nanoswe_proxy.state import State
from nanoswe_proxy.trajectory import Conservation, Provenance, Sample, Trajectory, Turn

SAME = ("stop", "finish_reason", "parse", "delivery", "requested")


def trajectory(state: State) -> Trajectory:
    """Cut the rows and check that no sampled token is lost or doubled."""
    policy, generations = state.policy, list(state.generations())
    number = {n.index: i for i, n in enumerate(generations)}
    turns = tuple(_turn(n, number) for n in generations)
    turns += tuple(_foreign(call, len(turns) + i) for i, call in state.calls.items())
    trained = [n for n, turn in zip(generations, turns, strict=False) if not turn.masked]
    inner = {a.index for n in trained for a in tree.path(n)[:-1]}
    leaves = [n for n in trained if n.index not in inner]
    owner: dict[int, int] = {}
    # stable sort: deepest first, ties by order
    for leaf in sorted(leaves, key=lambda n: -len(tree.path(n))):
        for node in tree.path(leaf):
            owner.setdefault(node.index, leaf.index)
    masked: Counter[str] = Counter()
    for turn in (t for t in turns if t.masked and t.sampled_tokens):
        masked[turn.masked] += turn.sampled_tokens
    samples = tuple(_row(leaf, owner, number) for leaf in leaves)
    sampled = sum(turn.sampled_tokens for turn in turns)
    kept = sum(s.provenance.count(Provenance.SAMPLED) for s in samples)
    lost = [f"turn {t.index}: lost in a crash" for t in turns if t.stop == "lost"]
    who = (policy.trial_id, policy.try_, policy.seed_key, policy.temperature)
    missing = (*lost, *(() if state.sealed else ("not sealed",)))
    counted = Conservation(sampled, kept, dict(masked))
    return Trajectory(
        *who, turns, samples, counted, missing, state.notes, tuple(state.calls.values())
    )


def _row(leaf: tree.Generation, owner: dict[int, int], number: dict[int, int]) -> Sample:
    tokens: list[int] = []
    kinds: list[str] = []
    stops = {}
    logprobs: list[float] = []
    versions: list[int] = []
    turns: list[int] = []
    for node in tree.path(leaf):
        n = len(node.ids)
        tokens += node.ids
        if isinstance(node, tree.Generation) and owner[node.index] == leaf.index:
            kinds.append(Provenance.SAMPLED * n)
            logprobs += node.logprobs
            versions += node.versions_of_tokens()
            turns += [number[node.index]] * n
            stops[number[node.index]] = node.stop
            continue
        replayed = Provenance.REPLAYED * n
        kinds.append(node.provenance if isinstance(node, tree.Context) else replayed)
        logprobs += [math.nan] * n
        versions += [-1] * n
        turns += [-1] * n
    columns = (tuple(logprobs), tuple(versions), tuple(turns))
    return Sample(tuple(tokens), "".join(kinds), *columns, stops)


def _turn(node: tree.Generation, number: dict[int, int]) -> Turn:
    up, masked = node.parent.parent, ""
    if node.delivery not in ("delivered", "acknowledged"):
        masked = "aborted" if node.delivery == "aborted" else "undelivered"
    size, up_to = len(node.ids), sum(len(p.ids) for p in tree.path(node)[:-1])
    fork = node.parent.fork if node.parent.children[0] is node else ""
    how: dict = {name: getattr(node, name) for name in SAME}
    parent = number[up.index] if up else -1
    return Turn(number[node.index], parent, up_to, size, fork=fork, masked=masked, **how)


def _foreign(call: dict, index: int) -> Turn:
    """A call that a provider answered, which counts tokens; none of them is known."""
    counts, finish = (call.get("prompt_tokens", 0), call.get("sampled_tokens", 0)), call["finish"]
    stop = "length" if finish == "length" else "stop"
    stop = stop if call["delivery"] == "delivered" else call.get("stop", "aborted")
    about = (stop, finish, "", call["delivery"] or "sampling", "", call["requested"])
    return Turn(index, -1, *counts, *about, masked="provider")
