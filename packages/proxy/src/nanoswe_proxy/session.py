"""One session: requests in as messages, prompts out as ids, sampled tokens in, replies out; sealed,
a Trajectory.

`prepare` (= `plan`, `draft`, `admit`) -> `feed` per token -> `commit` (or `abort`) -> `delivered`;
`seal` ends it. Every change is a record that is logged first and applied then, so the state is a
function of the log. All but `draft` belong on one event loop, and none of them waits: no state is
ever half changed. Refuses (SealedError) everything after `seal`, a prompt without room for one
token (ContextLengthError), and a tree that outgrows its limit (TooLarge).
"""

import json
import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanoswe_proxy import errors, export, tree, wire
from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.log import Log, Record
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.state import Policy, State, first
from nanoswe_proxy.trajectory import Trajectory

MAX_NODES = 20_000
Tools = list[dict] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request stands and what its missing part is rendered from."""

    place: tree.Place
    messages: Sequence[dict]
    tools: Tools
    tools_json: str
    replay: Mapping[int, Sequence[int]]  # sampled ids by index in `place.rest`


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that may be sampled: its node, the exact prompt, and how to sample."""

    node: tree.Generation
    ids: array
    sampling: Sampling
    tools: Tools


class Session(State):
    """The live record of one trial's model calls."""

    def __init__(self, opened: dict, renderer: Renderer, log: Log | None = None) -> None:
        super().__init__(opened)
        self.renderer, self._log = renderer, log

    @classmethod
    def open(
        cls, cap: str, policy: Policy, renderer: Renderer, max_context: int,
        log: Log | None = None, about: dict | None = None,
    ) -> "Session":  # fmt: skip
        """A new session."""
        opened = {"type": "open", "cap": cap, "policy": asdict(policy), "max_context": max_context}
        opened["about"] = about or {}
        if log:
            log.append(opened)
        return cls(opened, renderer, log)

    @classmethod
    def resume(cls, records: Sequence[Record], renderer: Renderer, log: Log) -> "Session":
        """The session that a log describes; what was under way died with the process."""
        session = cls(first(records), renderer, log)
        for fields, blob in records[1:]:
            session.apply(fields, blob)
        for node in session.generations():
            if node.delivery == "sampling":
                session._end(node, stop="lost")
        return session

    def prepare(self, messages: Sequence[dict], tools: Tools, requested: dict) -> Prepared:
        """The prompt for wire-normal messages. Reserves the node: calls keep their order."""
        plan = self.plan(messages, tools)
        try:
            context = self.draft(plan)
        except errors.Unextendable as error:
            context = self.draft(plan := self.plan(messages, tools, error.reason))
        return self.admit(plan, context, requested)

    def plan(self, messages: Sequence[dict], tools: Tools, reason: str = "") -> Plan:
        """Where the request stands now. A `reason` says why it may not extend what is there."""
        if self.sealed:
            raise errors.SealedError("the session is sealed")
        as_json = json.dumps(tools, ensure_ascii=False) if tools else ""
        place = tree.locate(self.roots, messages, as_json, self.cap, lossy=self.policy.lossy)
        reason = reason or self._closed(place)
        if reason:
            place = tree.Place(None, None, messages, reason, place.level)
        replay = {
            i: node.ids
            for i, m in enumerate(place.rest)
            if m["role"] == "assistant" and (node := self._sampled_before(m))
        }
        # Going on adds a reply and what follows it; a history that grew by less has lost a part.
        shrunk = len(place.rest) < self.longest + 2 and replay and place.parent is None
        if shrunk and place.fork == "observation_edited":
            place = replace(place, fork="condensed")
        return Plan(place, messages, tools, as_json, replay)

    def draft(self, plan: Plan) -> tree.Context:
        """Render what is missing: O(what is new). Reads only what never changes: any thread may."""
        place = plan.place
        if place.context:
            return place.context
        if place.parent is None:
            encoded = self.renderer.root(place.rest, plan.tools, plan.replay)
        else:
            history = [m for n in tree.path(place.parent) for m in tree.messages_of(n)]
            last = place.parent.ids
            encoded = self.renderer.tail(place.rest, last, plan.replay, history, plan.tools)
        ids = array("I", encoded.ids)
        made = (place.parent, place.rest, plan.tools_json, ids, encoded.provenance, place.fork)
        return tree.Context(-1, *made)

    def admit(
        self, plan: Plan, context: tree.Context, requested: dict, digest: str = ""
    ) -> Prepared:
        """Reserve the node of a call whose context was drafted."""
        if self.sealed:
            raise errors.SealedError("the session is sealed")
        if len(self.nodes) >= MAX_NODES:
            raise errors.TooLarge(f"the session has {len(self.nodes)} nodes, as many as it may")
        prompt = self.prompt(context)
        room = self.max_context - len(prompt)
        if room < 1:
            raise errors.ContextLengthError(self.max_context, len(prompt))
        if context.index < 0:
            context = self._add_context(context)
        for node in self._unacknowledged(context):
            self._write({"type": "delivery", "node": node.index, "state": "acknowledged"})
        intent = {"parent": context.index, "requested": requested, "messages": len(plan.messages)}
        intent |= {"level": plan.place.level, "created": int(time.time()), "digest": digest}
        self._write({"type": "intent", **intent})
        depth, ordinal = len(tree.path(context.parent)) // 2, len(context.children) - 1
        asked = [requested[k] for k in ("max_tokens", "max_completion_tokens") if requested.get(k)]
        sampling = Sampling(
            temperature=self.policy.temperature,
            max_tokens=max(1, min([room, self.policy.max_tokens, *asked])),
            stop_ids=self.renderer.stop_ids,
            # Named by place and not by arrival: a retry gets new numbers, a rerun the same ones.
            seed_key=f"{self.policy.seed_key}/{depth}.{ordinal}",
        )
        return Prepared(context.children[-1], prompt, sampling, plan.tools)

    @staticmethod
    def prompt(context: tree.Context) -> array:
        """All ids up to and with a context."""
        ids = array("I")
        for earlier in (*tree.path(context.parent), context):
            ids.extend(earlier.ids)
        return ids

    def feed(self, call: Prepared, sampled: Sampled) -> None:
        """Record one token. Refuses (EngineError) what cannot be trained or was not asked for."""
        node, ids = call.node, call.node.ids
        if self.sealed or node.delivery != "sampling":
            raise errors.SealedError("the call is over")
        if len(ids) >= call.sampling.max_tokens or (ids and ids[-1] in call.sampling.stop_ids):
            raise errors.EngineError("the engine sampled past its stop")
        if not math.isfinite(sampled.logprob) or sampled.version < 0 or sampled.token < 0:
            raise errors.EngineError(f"the engine gave a token that cannot be recorded: {sampled}")
        if node.versions and sampled.version < node.versions[-1][1]:
            raise errors.EngineError("the engine's weight version went backwards in a call")
        node.append(sampled.token, sampled.logprob, sampled.version)

    def commit(self, call: Prepared) -> dict:
        """Freeze the generation; the assistant message to serve, as Chat Completions has it."""
        node, ids = call.node, call.node.ids
        if self.sealed or node.delivery != "sampling":
            raise errors.SealedError("the call is over")
        stopped = bool(ids) and ids[-1] in call.sampling.stop_ids
        if not stopped and len(ids) < call.sampling.max_tokens:
            raise errors.EngineError(f"the engine ended after {len(ids)} tokens without a stop")
        parsed = self.renderer.parse(ids, not stopped, call.tools)
        message: dict = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": tree.echo_id(self.cap, node.index, i), "type": "function",
                 "function": {"name": c.name, "arguments": c.arguments}}
                for i, c in enumerate(parsed.calls)
            ]  # fmt: skip
        self._end(
            node,
            stop="stop" if stopped else "length",
            finish="length" if not stopped else "tool_calls" if parsed.calls else "stop",
            parse=parsed.status,
            view=wire.normalise([message])[0],
        )
        return message

    def abort(self, call: Prepared) -> None:
        """Keep what was sampled, masked: nothing may extend it."""
        if call.node.delivery == "sampling" and not self.sealed:
            self._end(call.node, stop="aborted")

    def delivered(self, call: Prepared) -> None:
        """The transport took the last byte of the reply."""
        if call.node.delivery == "committed" and not self.sealed:
            self._write({"type": "delivery", "node": call.node.index, "state": "delivered"})

    def annotate(self, notes: dict) -> None:
        """Facts about the whole session, such as its reward: they are part of the export."""
        if self.sealed:
            raise errors.SealedError("the session is sealed")
        self._write({"type": "note", "notes": notes})

    def seal(self) -> Trajectory:
        """Freeze for good. Sealing again gives an equal object."""
        if not self.sealed:
            for node in self.generations():
                if node.delivery == "sampling":
                    self._end(node, stop="aborted")
            self._write({"type": "seal"})
            if self._log:
                self._log.close()
        return export.trajectory(self)

    def _closed(self, place: tree.Place) -> str:
        """Why the generation that the request extends may not be extended; "" if it may."""
        cut = place.parent is not None and place.parent.stop == "length"
        return "truncated_open" if cut and self.policy.truncated == "fork" else ""

    def _sampled_before(self, message: dict) -> tree.Generation | None:
        """The generation that an assistant message repeats, wherever it stands in the forest."""
        claimed = tree.echoed(self.cap, message)
        if claimed is not None and claimed < len(self.nodes):
            candidates = [self.nodes[claimed]]
        else:
            candidates = list(self.by_text[wire.text_key(message)])
        for node in reversed(candidates):
            if isinstance(node, tree.Generation) and node.committed:
                level = wire.level_of(node.view, message, claimed is not None)
                if level <= (wire.LOSSY if len(candidates) == 1 else wire.NORMAL):
                    return node
        return None

    def _unacknowledged(self, context: tree.Context) -> Iterable[tree.Generation]:
        node = context.parent
        while node and node.delivery != "acknowledged":
            yield node
            node = node.parent.parent

    def _add_context(self, context: tree.Context) -> tree.Context:
        parent = context.parent.index if context.parent else None
        fields = {"parent": parent, "messages": context.messages, "tools": context.tools}
        fields |= {"fork": context.fork, "n": len(context.ids)}
        ids = array("I", context.ids).tobytes()
        self._write({"type": "context", **fields}, ids + context.provenance.encode())
        siblings = context.parent.children if context.parent else self.roots
        return siblings[-1]

    def _end(self, node: tree.Generation, stop: str, **fields: Any) -> None:
        end = {"node": node.index, "n": len(node.ids), "versions": node.versions, "stop": stop}
        self._write({"type": "end", **end, **fields}, node.ids.tobytes() + node.logprobs.tobytes())

    def _write(self, fields: dict, blob: bytes = b"") -> None:
        if self._log:
            self._log.append(fields, blob)
        self.apply(fields, blob)
