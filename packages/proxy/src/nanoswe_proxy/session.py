"""One session: messages in, prompts out as ids; sampled tokens in, replies out; then a Trajectory.

`prepare` (= `locate`, `draft`, `admit`) -> `feed` per token -> `commit` (or `abort`) ->
`delivered`; `seal` ends it. Every change is a record that is logged first and applied then, so the
state is a function of the log. All but `draft` belong on one event loop, and none of them waits: no
state is ever half changed. Refuses (SealedError) everything after `seal`, a prompt without room for
one token (ContextLengthError), and a tree that outgrows its limit (413).
"""

import json
import math
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from nanoswe_proxy import errors, export, tree, wire
from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.log import Log, Record
from nanoswe_proxy.parse import Reader
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.render.syntax import NO_CALLS
from nanoswe_proxy.render.types import Delta, Parsed, Tools
from nanoswe_proxy.state import Policy, State
from nanoswe_proxy.trajectory import Trajectory

MAX_NODES = 20_000


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that may be sampled: its node, the exact prompt, how to sample; and what it said."""

    node: tree.Generation
    ids: array
    size: int
    sampling: Sampling
    reader: Reader
    deltas: list[Delta] = field(default_factory=list)


class Session(State):
    """The live record of one trial's model calls."""

    def __init__(self, renderer: Renderer, log: Log | None = None) -> None:
        super().__init__()
        self.renderer, self._log = renderer, log
        self._said: dict[int, Parsed] = {}  # by node, what ids spell, until the reply comes back

    @classmethod
    def open(
        cls, cap: str, policy: Policy, renderer: Renderer, max_context: int, log: Log | None = None
    ) -> "Session":
        """A new session."""
        session = cls(renderer, log)
        facts = {"cap": cap, "policy": asdict(policy), "max_context": max_context}
        session._write({"type": "open", **facts})
        return session

    @classmethod
    def resume(cls, records: Sequence[Record], renderer: Renderer, log: Log) -> "Session":
        """The session that a log describes; what was under way died with the process."""
        session = cls(renderer, log)
        for fields, blob in records:
            session.apply(fields, blob)
        session._cut("lost")
        return session

    def prepare(self, messages: Sequence[dict], tools: Tools, requested: dict) -> Prepared:
        """The prompt for wire-normal messages. Reserves the node: calls keep their order."""
        place = self.locate(messages, tools)
        contexts = [self.draft(place, messages)]
        return self.admit(contexts, place.level, len(messages), requested)[0]

    def locate(self, messages: Sequence[dict], tools: Tools) -> tree.Place:
        """Where the request stands now."""
        if self.sealed:
            raise errors.SealedError("the session is sealed")
        said = json.dumps(tools or None, ensure_ascii=False)
        return tree.locate(self.roots, messages, said, self.cap)

    def draft(
        self, place: tree.Place, messages: Sequence[dict], whole: bool = True
    ) -> tree.Context:
        """Render what is missing: O(what is new). Changes nothing: any thread may. Unless the
        `whole` history may be rendered, raises Unextendable where it has to be.
        """
        if place.context:
            return place.context
        parent, rest, fork = place.parent, place.rest, place.fork
        tools = tree.tool_list(place.tools)
        replay = self._replayed(rest)
        if parent:
            history = [m for node in tree.path(parent) for m in node.messages]
            try:
                said = self._said.get(parent.index)
                encoded = self.renderer.tail(rest, parent.ids, replay, history, tools, said)
            except errors.Unextendable as error:
                if not whole:
                    raise
                parent, rest, fork = None, messages, str(error)
                replay = self._replayed(rest)
        if parent is None:
            encoded = self.renderer.root(rest, tools, replay)
        # Going on adds a reply and what follows it; a history that grew by less has lost a part,
        # and that part is more than one reply.
        grown = len(messages) - self.longest + (fork == "reply_dropped")
        if replay and grown < 2 and fork in tree.EDITED:
            fork = "condensed"
        packed = zlib.compress(encoded.provenance.encode())
        return tree.Context(-1, parent, rest, place.tools, array("I", encoded.ids), packed, fork)

    def raw(self, prompt: str | Sequence[int]) -> tree.Context:
        """The context of a completion. Changes nothing: any thread may."""
        ids, kinds = self.renderer.codec.raw(prompt)
        return tree.Context(-1, None, [], "", array("I", ids), zlib.compress(kinds.encode()), "")

    def admit(
        self, contexts: Sequence[tree.Context], level: int, size: int, requested: dict,
        digest: str = "", n: int = 1,
    ) -> list[Prepared]:  # fmt: skip
        """Reserve the nodes of a call whose contexts were drafted: `n` replies to each."""
        if self.sealed:
            raise errors.SealedError("the session is sealed")
        if len(self.nodes) + n * len(contexts) > MAX_NODES:
            raise errors.ProxyError(f"the session has {MAX_NODES} nodes", 413, "session_full")
        prompts = [tree.prompt(context) for context in contexts]
        longest = max(map(len, prompts))
        if longest >= self.max_context:
            raise errors.ContextLengthError(self.max_context, longest)
        contexts = [self._add_context(c) if c.index < 0 else c for c in contexts]
        node = contexts[0].parent
        while node and node.delivery != "acknowledged":  # its reply came back: it was received
            self._write({"type": "delivery", "node": node.index, "state": "acknowledged"})
            self._said.pop(node.index, None)
            node = node.parent.parent
        parents = [c.index for c in contexts for _ in range(n)]
        intent = {"type": "intent", "parents": parents, "requested": requested, "messages": size}
        self._write(intent | {"level": level, "created": int(time.time()), "digest": digest})
        made = cast(list[tree.Generation], self.nodes[-len(parents) :])
        return [self._prepared(node, prompts[i // n]) for i, node in enumerate(made)]

    def unreceived(self) -> Iterator[list[Prepared]]:
        """The calls that were committed before a crash, and that nobody received."""
        calls: list[list[tree.Generation]] = []
        for node in self.generations():
            if not node.choice:
                calls.append([])
            calls[-1].append(node)
        for nodes in calls:
            if all(node.delivery == "committed" for node in nodes):
                yield [self._recovered(node) for node in nodes]

    def feed(self, call: Prepared, sampled: Sampled) -> bool:
        """Record a token; whether more are wanted. Refuses what cannot train or is too much."""
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
        call.deltas.extend(call.reader.feed([sampled.token]))
        return not call.reader.cut

    def commit(self, call: Prepared) -> dict:
        """Freeze the generation; the message to serve, wire-normal."""
        node, ids = call.node, call.node.ids
        if self.sealed or node.delivery != "sampling":
            raise errors.SealedError("the call is over")
        stopped = bool(ids) and ids[-1] in call.sampling.stop_ids
        if not stopped and not call.reader.cut and len(ids) < call.sampling.max_tokens:
            raise errors.EngineError(f"the engine ended after {len(ids)} tokens without a stop")
        call.deltas.extend(call.reader.end(not stopped))
        parsed = call.reader.parsed
        role = "completion" if node.parent.raw else "assistant"  # no message is like the former
        view: dict = {"role": role, "content": parsed.content}
        view |= {"reasoning": parsed.reasoning} if parsed.reasoning else {}
        if parsed.calls:
            view["calls"] = [
                {"name": c.name, "arguments": wire.canonical_json(c.arguments),
                 "id": tree.echo_id(self.cap, node.index, i)}
                for i, c in enumerate(parsed.calls)
            ]  # fmt: skip
        stop = "stop_string" if call.reader.cut else "stop" if stopped else "length"
        finish = "length" if stop == "length" else "tool_calls" if parsed.calls else "stop"
        self._end(node, stop=stop, finish=finish, parse=parsed.status, view=view)
        if not (call.reader.cut or node.parent.raw):  # all of it was read, and may be extended
            self._said[node.index] = parsed
        return view

    def abort(self, call: Prepared) -> None:
        """Keep what was sampled, masked: nothing may extend it."""
        if call.node.delivery == "sampling" and not self.sealed:
            self._end(call.node, stop="aborted")

    def delivered(self, call: Prepared) -> None:
        """The transport took the last byte of the reply."""
        if call.node.delivery == "committed" and not self.sealed:
            self._write({"type": "delivery", "node": call.node.index, "state": "delivered"})

    def annotate(self, notes: dict) -> dict:
        """Facts about the whole session, such as its reward: they are part of the export."""
        if self.sealed:
            raise errors.SealedError("the session is sealed")
        self._write({"type": "note", "notes": notes})
        return self.notes

    def foreign(self, number: int, **facts: Any) -> None:
        """What is known of a call that a provider answers, before it does and after."""
        if self.sealed or number >= MAX_NODES:
            raise errors.SealedError("the session is sealed, or has too many calls")
        self._write({"type": "call", "number": number, **facts})

    def seal(self) -> Trajectory:
        """Freeze for good. Sealing again gives an equal object."""
        if not self.sealed:
            self._cut("aborted")
            self._write({"type": "seal"})
            if self._log:
                self._log.close()
        return export.trajectory(self)

    def _cut(self, stop: str) -> None:
        """The end of all that is under way."""
        for node in self.generations():
            if node.delivery == "sampling":
                self._end(node, stop=stop)
        for number in [n for n, call in self.calls.items() if not call["delivery"]]:
            self.foreign(number, delivery="aborted", stop=stop)

    def _prepared(self, node: tree.Generation, prompt: array) -> Prepared:
        context, requested = node.parent, node.requested
        asked = [requested[k] for k in ("max_tokens", "max_completion_tokens") if requested.get(k)]
        most = max(1, min([self.max_context - len(prompt), self.policy.max_tokens, *asked]))
        # Named by place and not by arrival: a retry gets new numbers, a rerun the same ones.
        place = tree.prompt_key(prompt) if context.raw else len(tree.path(context.parent)) // 2
        ordinal = sum(earlier.index < node.index for earlier in context.children)
        key = f"{self.policy.seed_key}/{place}.{ordinal}"
        sampling = Sampling(self.policy.temperature, most, self.renderer.stop_ids, key)
        return Prepared(node, prompt, len(prompt), sampling, self._reader(node))

    def _recovered(self, node: tree.Generation) -> Prepared:
        reader, size = self._reader(node), len(tree.prompt(node.parent))
        said = [*reader.feed(node.ids), *reader.end(node.stop != "stop")]
        return Prepared(node, array("I"), size, Sampling(0, 0, (), ""), reader, said)

    def _reader(self, node: tree.Generation) -> Reader:
        stops = node.requested.get("stop", ())
        if node.parent.raw:
            return Reader(self.renderer.codec, NO_CALLS, self.renderer.stop_ids, stops)
        return self.renderer.reader(tree.tool_list(node.parent.tools), stops)

    def _replayed(self, messages: Sequence[dict]) -> dict[int, array]:
        """The sampled ids of the replies among `messages` that were sampled here, by index."""
        replies = {i: m for i, m in enumerate(messages) if m["role"] == "assistant"}
        by_text = defaultdict(list)
        for node in self.generations() if replies else ():
            if node.committed:
                by_text[wire.text_key(node.view)].append(node)
        alike = {i: by_text[wire.text_key(m)] for i, m in replies.items()}
        spoken = ((i, self._sampled_before(m, alike[i])) for i, m in replies.items())
        return {i: node.ids for i, node in spoken if node}

    def _sampled_before(self, message: dict, candidates: list) -> tree.Generation | None:
        """The generation that an assistant message repeats, wherever it stands in the forest."""
        claimed = tree.echoed(self.cap, message)
        if claimed is not None and claimed < len(self.nodes):
            candidates = [self.nodes[claimed]]
        for node in reversed(candidates):
            if isinstance(node, tree.Generation) and node.committed:
                level = wire.level_of(node.view, message, claimed is not None)
                if level <= (wire.LOSSY if len(candidates) == 1 else wire.NORMAL):
                    return node
        return None

    def _add_context(self, context: tree.Context) -> tree.Context:
        if context.raw and (known := self.prompts.get(tree.prompt_key(context.ids))):
            return known
        parent = context.parent.index if context.parent else None
        fields = {"parent": parent, "messages": context.messages, "fork": context.fork}
        fields |= {"n": len(context.ids)} | ({} if context.parent else {"tools": context.tools})
        columns = array("I", context.ids).tobytes() + context.packed
        self._write({"type": "context", **fields}, columns)
        return cast(tree.Context, self.nodes[-1])

    def _end(self, node: tree.Generation, stop: str, **fields: Any) -> None:
        end = {"node": node.index, "n": len(node.ids), "versions": node.versions, "stop": stop}
        self._write({"type": "end", **end, **fields}, node.ids.tobytes() + node.logprobs.tobytes())

    def _write(self, fields: dict, blob: bytes = b"") -> None:
        if self._log:
            self._log.append(fields, blob)
        self.apply(fields, blob)
