"""One session: requests in as messages, prompts out as ids, sampled tokens in, replies out; sealed,
a Trajectory.

`prepare` -> `feed` per token -> `commit` (or `abort`) -> `delivered`; `seal` ends it. All of these
are synchronous: on one event loop nothing can come between their steps, so each is its own lock and
no state is ever half changed. Refuses (SealedError) everything after `seal`, and a prompt without
room for one token (ContextLengthError).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanoswe_proxy import export, tree, wire
from nanoswe_proxy.engine.base import Sampled, Sampling
from nanoswe_proxy.errors import ContextLengthError, EngineError, SealedError
from nanoswe_proxy.render.base import Renderer
from nanoswe_proxy.trajectory import Trajectory


@dataclass(frozen=True)
class Policy:
    """What the session fixes for all of its calls, whatever the agent asks for."""

    trial_id: str
    try_: int
    seed_key: str
    temperature: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that may be sampled: its node, the exact prompt, and how to sample."""

    node: tree.Generation
    ids: tuple[int, ...]
    sampling: Sampling


class Session:
    """The live record of one trial's model calls."""

    def __init__(self, cap: str, policy: Policy, renderer: Renderer, max_context: int) -> None:
        self.cap, self.policy, self.renderer = cap, policy, renderer
        self.max_context = max_context
        self.roots: list[tree.Context] = []
        self.nodes: list[tree.Context | tree.Generation] = []
        self.sealed: Trajectory | None = None
        self.longest = 0  # messages in the longest request so far
        self.matches = [0, 0]  # requests by weakest match level

    def prepare(
        self, messages: Sequence[dict], tools: list[dict] | None, requested: dict
    ) -> Prepared:
        """The prompt for wire-normal messages. Reserves the node: calls that overlap keep their
        order.
        """
        if self.sealed:
            raise SealedError("the session is sealed")
        tools_json = json.dumps(tools, ensure_ascii=False) if tools else ""
        place = tree.locate(self.roots, messages, tools_json, self.cap)
        context = place.context or self._new_context(place, tools, tools_json)
        prompt: list[int] = []
        for earlier in tree.path(context.parent):
            prompt += tree.ids_of(earlier)
        prompt += context.encoded.ids
        room = self.max_context - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_context} tokens. "
                f"However, your messages resulted in {len(prompt)} tokens."
            )
        if place.context is None:
            self._add_context(context)
        self.longest = max(self.longest, len(messages))
        self.matches[place.level] += 1
        self._acknowledge(context)
        node = tree.Generation(len(self.nodes), context, requested)
        depth, ordinal = len(tree.path(context.parent)) // 2, len(context.children)
        context.children.append(node)
        self.nodes.append(node)
        wanted = [requested[k] for k in ("max_tokens", "max_completion_tokens") if requested.get(k)]
        sampling = Sampling(
            temperature=self.policy.temperature,
            max_tokens=max(1, min([room, self.policy.max_tokens, *wanted])),
            stop_ids=self.renderer.stop_ids,
            # Named by place and not by arrival: a retry gets new numbers, a rerun the same ones.
            seed_key=f"{self.policy.seed_key}/{depth}.{ordinal}",
        )
        return Prepared(node, tuple(prompt), sampling)

    def feed(self, call: Prepared, sampled: Sampled) -> None:
        """Record one token. Refuses (EngineError) what cannot be trained or was not asked for."""
        node, ids = call.node, call.node.ids
        if self.sealed or node.delivery != "sampling":
            raise SealedError("the call is over")
        if len(ids) >= call.sampling.max_tokens or (ids and ids[-1] in call.sampling.stop_ids):
            raise EngineError("the engine sampled past its stop")
        if not math.isfinite(sampled.logprob) or sampled.version < 0 or sampled.token < 0:
            raise EngineError(f"the engine gave a token that cannot be recorded: {sampled}")
        if node.versions and sampled.version < node.versions[-1]:
            raise EngineError("the engine's weight version went backwards inside a generation")
        ids.append(sampled.token)
        node.logprobs.append(sampled.logprob)
        node.versions.append(sampled.version)

    def commit(self, call: Prepared) -> dict:
        """Freeze the generation; the assistant message to serve."""
        node, ids = call.node, call.node.ids
        if self.sealed or node.delivery != "sampling":
            raise SealedError("the call is over")
        stopped = bool(ids) and ids[-1] in call.sampling.stop_ids
        if not stopped and len(ids) < call.sampling.max_tokens:
            raise EngineError(f"the engine ended after {len(ids)} tokens without a stop")
        parsed = self.renderer.parse(ids, truncated=not stopped)
        message: dict = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {
                    "id": tree.echo_id(self.cap, node.index, i),
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for i, c in enumerate(parsed.calls)
            ]
        node.view = wire.normalise_one(message)
        node.parsed = parsed
        node.stop = "stop" if stopped else "length"
        node.finish_reason = "length" if not stopped else "tool_calls" if parsed.calls else "stop"
        node.delivery = "committed"
        return message

    def abort(self, call: Prepared) -> None:
        """Keep what was sampled, masked: nothing may extend it."""
        if call.node.delivery == "sampling":
            call.node.delivery = "aborted"

    def delivered(self, call: Prepared) -> None:
        """The transport took the last byte of the reply."""
        if call.node.delivery == "committed":
            call.node.delivery = "delivered"

    def seal(self) -> Trajectory:
        """Freeze for good. Sealing again gives the same object."""
        if self.sealed is None:
            for node in self.nodes:
                if isinstance(node, tree.Generation) and node.delivery == "sampling":
                    node.delivery = "aborted"
            self.sealed = export.trajectory(self.policy, self.nodes)
        return self.sealed

    def _new_context(
        self, place: tree.Place, tools: list[dict] | None, tools_json: str
    ) -> tree.Context:
        replay = {
            i: node.ids
            for i, m in enumerate(place.rest)
            if m["role"] == "assistant" and (node := self._sampled_before(m))
        }
        if place.parent is None:
            encoded = self.renderer.root(place.rest, tools, replay)
        else:
            history = [m for n in tree.path(place.parent) for m in tree.messages_of(n)]
            last = place.parent.ids
            encoded = self.renderer.tail(place.rest, last, replay, history, tools)
        # Going on adds a reply and what follows it; a history that grew by less has lost a part.
        shrunk = len(place.rest) < self.longest + 2 and replay and place.parent is None
        fork = "condensed" if shrunk and place.fork == "observation_edited" else place.fork
        return tree.Context(-1, place.parent, tuple(place.rest), tools_json, encoded, fork)

    def _add_context(self, context: tree.Context) -> None:
        context.index = len(self.nodes)
        self.nodes.append(context)
        (context.parent.children if context.parent else self.roots).append(context)

    def _sampled_before(self, message: dict) -> tree.Generation | None:
        """The generation that an assistant message repeats, wherever it stands in the forest."""
        claimed = tree.echoed(self.cap, message)
        for node in self.nodes[::-1] if claimed is None else self.nodes[claimed : claimed + 1]:
            match node:
                case tree.Generation(committed=True) if wire.same(node.view, message):
                    return node
        return None

    def _acknowledge(self, context: tree.Context) -> None:
        for node in tree.path(context.parent):
            if isinstance(node, tree.Generation):
                node.delivery = "acknowledged"
