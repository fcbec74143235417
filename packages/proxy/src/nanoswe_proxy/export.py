"""A session's nodes in, a Trajectory out: one row per surviving leaf, each sampled token owned
exactly once.

A generation is trained in the deepest leaf that contains it (ties: the first), and is context in
the others. Masked with a reason, and counted: `aborted` (cut off by a fault, a cancel or the seal)
and `undelivered` (the agent never got the reply). A call that a crash swallowed makes the
trajectory incomplete.
"""

import math
from collections import Counter

from nanoswe_proxy import tree
from nanoswe_proxy.state import State
from nanoswe_proxy.trajectory import Conservation, Provenance, Sample, Trajectory, Turn


def trajectory(state: State) -> Trajectory:
    """Cut the rows and check that no sampled token is lost or doubled."""
    policy, generations = state.policy, list(state.generations())
    number = {n.index: i for i, n in enumerate(generations)}
    reasons = {n.index: _masked(n) for n in generations}
    trained_nodes = [n for n in generations if not reasons[n.index]]
    inner = {a.index for n in trained_nodes for a in tree.path(n)[:-1]}
    leaves = [n for n in trained_nodes if n.index not in inner]
    owner: dict[int, int] = {}
    # stable sort: deepest first, ties by order
    for leaf in sorted(leaves, key=lambda n: -len(tree.path(n))):
        for node in tree.path(leaf):
            owner.setdefault(node.index, leaf.index)
    masked: Counter[str] = Counter()
    for node in generations:
        if reasons[node.index] and node.ids:
            masked[reasons[node.index]] += len(node.ids)
    samples = tuple(_row(leaf, owner, number) for leaf in leaves)
    incomplete = [
        f"turn {number[n.index]}: lost in a crash" for n in generations if n.stop == "lost"
    ]
    return Trajectory(
        trial_id=policy.trial_id,
        try_=policy.try_,
        seed_key=policy.seed_key,
        temperature=policy.temperature,
        turns=tuple(_turn(n, number, reasons[n.index]) for n in generations),
        samples=samples,
        conservation=Conservation(
            sum(len(n.ids) for n in generations),
            sum(s.provenance.count(Provenance.SAMPLED) for s in samples),
            dict(masked),
        ),
        incomplete=(*incomplete, *(() if state.sealed else ("not sealed",))),
        notes=state.notes,
        about=state.about,
    )


def _masked(node: tree.Generation) -> str:
    if node.delivery in ("delivered", "acknowledged"):
        return ""
    return "aborted" if node.delivery == "aborted" else "undelivered"


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
            starts = [start for start, _ in node.versions] + [n]
            for (start, version), end in zip(node.versions, starts[1:], strict=True):
                versions += [version] * (end - start)
            turns += [number[node.index]] * n
            stops[number[node.index]] = node.stop
            continue
        replayed = Provenance.REPLAYED * n
        kinds.append(node.provenance if isinstance(node, tree.Context) else replayed)
        logprobs += [math.nan] * n
        versions += [-1] * n
        turns += [-1] * n
    return Sample(
        tuple(tokens), "".join(kinds), tuple(logprobs), tuple(versions), tuple(turns), stops
    )


def _turn(node: tree.Generation, number: dict[int, int], masked: str) -> Turn:
    up = node.parent.parent
    return Turn(
        index=number[node.index],
        parent=number[up.index] if up else -1,
        prompt_tokens=sum(len(p.ids) for p in tree.path(node)[:-1]),
        sampled_tokens=len(node.ids),
        stop=node.stop,
        finish_reason=node.finish_reason,
        parse=node.parse,
        delivery=node.delivery,
        fork=node.parent.fork if node.parent.children[0] is node else "",
        requested=node.requested,
        masked=masked,
    )
