"""A session's nodes in, a Trajectory out: one row per surviving leaf, each sampled token owned
exactly once.

A generation is trained in the deepest leaf that contains it (ties: the first), and is context in
the others. Masked with a reason, and counted: `aborted` (cut off by a fault, a cancel or the seal)
and `undelivered` (the agent never got the reply).
"""

import math
from collections.abc import Sequence
from typing import Protocol

from nanoswe_proxy import tree
from nanoswe_proxy.trajectory import Conservation, Provenance, Sample, Trajectory, Turn


class Named(Protocol):
    """The part of a session's policy that a trajectory carries."""

    @property
    def trial_id(self) -> str: ...
    @property
    def try_(self) -> int: ...
    @property
    def seed_key(self) -> str: ...
    @property
    def temperature(self) -> float: ...


def trajectory(policy: Named, nodes: Sequence[tree.Context | tree.Generation]) -> Trajectory:
    """Cut the rows and check that no sampled token is lost or doubled."""
    generations = [n for n in nodes if isinstance(n, tree.Generation)]
    number = {n.index: i for i, n in enumerate(generations)}
    trained_nodes = [n for n in generations if _trains(n)]
    inner = {a.index for n in trained_nodes for a in tree.path(n)[:-1]}
    leaves = [n for n in trained_nodes if n.index not in inner]
    owner: dict[int, int] = {}
    # stable sort: deepest first, ties by order
    for leaf in sorted(leaves, key=lambda n: -len(tree.path(n))):
        for node in tree.path(leaf):
            owner.setdefault(node.index, leaf.index)
    masked: dict[str, int] = {}
    for node in generations:
        if not _trains(node) and node.ids:
            reason = "aborted" if node.delivery == "aborted" else "undelivered"
            masked[reason] = masked.get(reason, 0) + len(node.ids)
    samples = tuple(_row(leaf, owner, number) for leaf in leaves)
    trained = sum(s.provenance.count(Provenance.SAMPLED) for s in samples)
    return Trajectory(
        trial_id=policy.trial_id,
        try_=policy.try_,
        seed_key=policy.seed_key,
        temperature=policy.temperature,
        turns=tuple(_turn(n, number) for n in generations),
        samples=samples,
        conservation=Conservation(sum(len(n.ids) for n in generations), trained, masked),
    )


def _trains(node: tree.Generation) -> bool:
    return node.delivery in ("delivered", "acknowledged")


def _row(leaf: tree.Generation, owner: dict[int, int], number: dict[int, int]) -> Sample:
    tokens: list[int] = []
    provenance, stops = "", {}
    logprobs: list[float] = []
    versions: list[int] = []
    turns: list[int] = []
    for node in tree.path(leaf):
        if isinstance(node, tree.Generation) and owner[node.index] == leaf.index:
            n = len(node.ids)
            tokens += node.ids
            provenance += Provenance.SAMPLED * n
            logprobs += node.logprobs
            versions += node.versions
            turns += [number[node.index]] * n
            stops[number[node.index]] = node.stop
            continue
        ids = tree.ids_of(node)
        tokens += ids
        provenance += (
            node.encoded.provenance
            if isinstance(node, tree.Context)
            else Provenance.REPLAYED * len(ids)
        )
        logprobs += [math.nan] * len(ids)
        versions += [-1] * len(ids)
        turns += [-1] * len(ids)
    return Sample(tuple(tokens), provenance, tuple(logprobs), tuple(versions), tuple(turns), stops)


def _turn(node: tree.Generation, number: dict[int, int]) -> Turn:
    parents = tree.path(node)[:-1]
    up = node.parent.parent
    return Turn(
        index=number[node.index],
        parent=number[up.index] if up else -1,
        prompt_tokens=sum(len(tree.ids_of(p)) for p in parents),
        sampled_tokens=len(node.ids),
        stop=node.stop,
        finish_reason=node.finish_reason,
        parse=node.parsed.status,
        delivery=node.delivery,
        fork=node.parent.fork if node.parent.children[0] is node else "",
        requested=node.requested,
    )
