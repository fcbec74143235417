"""A page to look at a session, open or sealed: the tree of turns, every token with its provenance.

In: a session. Out: one HTML file that needs nothing else and runs no script but its own: what
tokens spell reaches it as data, escaped, and is only ever set as text.
"""

import json
import secrets
from itertools import groupby
from pathlib import Path

from nanoswe_proxy import tree
from nanoswe_proxy.render.codec import Codec
from nanoswe_proxy.session import Session


def page(session: Session) -> str:
    """The HTML of a session as it is now."""
    nodes = [_node(n, session.renderer.codec) for n in session.nodes]
    facts = {"trial": session.policy.trial_id, "try": session.policy.try_, "nodes": nodes}
    data = json.dumps(facts | {"sealed": bool(session.sealed)}).replace("<", "\\u003c")
    html = Path(__file__).with_name("view.html").read_text(encoding="utf-8")
    return html.replace("NONCE", secrets.token_urlsafe(16)).replace("DATA", data)


def _node(node: tree.Context | tree.Generation, codec: Codec) -> dict:
    parent = node.parent.index if node.parent else -1
    if isinstance(node, tree.Context):
        runs = groupby(zip(node.ids, node.provenance, strict=True), key=lambda pair: pair[1])
        spans = [(kind, [i for i, _ in run]) for kind, run in runs]
        tokens = [[kind, codec.decode(ids), len(ids)] for kind, ids in spans]
        return {"parent": parent, "fork": node.fork, "tokens": tokens}
    spelled = (codec.decode([i]) for i in node.ids)
    logprobs = (round(x, 4) for x in node.logprobs)
    said = list(zip(spelled, logprobs, node.versions_of_tokens(), strict=True))
    how = {k: getattr(node, k) for k in ("stop", "finish_reason", "parse", "delivery")}
    return {"parent": parent, "said": True, "tokens": said, **how}
