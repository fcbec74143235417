"""E1-E10: what a system exported against what the engine logged.

In: the engine's log of one conversation, the export, the fewest rows that the conversation needs.
Out: `Score`, which adds up over conversations. The log and the agent's own bookkeeping are the only
sources; nothing that a system says about itself is believed, but for its mark of incompleteness.
"""

from collections import Counter
from dataclasses import dataclass, fields

from systems import Export


@dataclass
class Score:
    """Counts; `table` makes shares of them."""

    generations: int = 0  # exported with a training mask
    exact: int = 0  # E1: of these, those whose prefix in the row is the engine's prompt
    exported_tokens: int = 0
    true_tokens: int = 0  # E2: id and logprob as the engine gave them
    sampled_tokens: int = 0
    once_tokens: int = 0  # E3: trained exactly once
    rows: int = 0
    needed_rows: int = 0  # E4
    false_merges: int = 0  # E5: a generation in a row after a history that the engine never saw
    duplicates: int = 0  # E6: one generation trained twice
    injected: int = 0  # E7: structural ids that came from observations
    replies: int = 0
    stream_differs: int = 0  # E8
    conversations: int = 0
    failed: int = 0  # E9: ended by an error that the bare engine would not give
    silent: int = 0  # E10: a generation is missing and nothing says so
    refused: int = 0  # a clean error instead of an answer: apart from wrong

    def add(self, other: "Score") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def table(self) -> dict[str, str]:
        def share(a: int, b: int) -> str:
            return f"{100 * a / b:.1f} %" if b else "-"

        return {
            "E1 prefix exact": share(self.exact, self.generations),
            "E2 sampled ids and logprobs": share(self.true_tokens, self.exported_tokens),
            "E3 yield": share(self.once_tokens, self.sampled_tokens),
            "E4 rows / fewest": f"{self.rows / self.needed_rows:.2f}" if self.needed_rows else "-",
            "E5 false merges": str(self.false_merges),
            "E6 duplicates": str(self.duplicates),
            "E7 injected structure": str(self.injected),
            "E8 stream = non-stream": share(self.replies - self.stream_differs, self.replies),
            "E9 agent success": share(self.conversations - self.failed, self.conversations),
            "E10 silent loss": str(self.silent),
            "refused": str(self.refused),
        }


def score(log: list[dict], export: Export, needed: int) -> Score:
    found = Score(rows=len(export.rows), needed_rows=needed, conversations=1)
    truth: dict[tuple, list[list[int]]] = {}
    for entry in log:
        found.sampled_tokens += len(entry["sampled"])
        key = tuple((t, lp) for t, lp in entry["sampled"])
        truth.setdefault(key, []).append(entry["prompt"])
    seen: dict[tuple, int] = {}
    for row in export.rows:
        for start, end in runs(row.mask):
            found.exported_tokens += end - start
            prompts = truth.get(
                tuple(zip(row.tokens[start:end], row.logprobs[start:end], strict=True))
            )
            if prompts is None:
                continue
            found.generations += 1
            found.true_tokens += end - start
            if row.tokens[:start] in prompts:
                found.exact += 1
                full = (*row.tokens[:start], None, *row.tokens[start:end])
                seen[full] = seen.get(full, 0) + 1
            else:
                found.false_merges += 1
    keys = [(*e["prompt"], None, *(t for t, _ in e["sampled"])) for e in log]
    logged = Counter(keys)
    for entry, key in zip(log, keys, strict=True):
        found.once_tokens += len(entry["sampled"]) * (0 < seen.get(key, 0) <= logged[key])
    found.duplicates = sum(max(0, n - logged[k]) for k, n in seen.items())
    missing = found.sampled_tokens - export.accounted
    found.silent = int(missing > 0 and not export.incomplete)
    return found


def runs(mask: list[bool]):
    """(start, end) of every stretch that trains."""
    start = None
    for i, trained in enumerate([*mask, False]):
        if trained and start is None:
            start = i
        elif not trained and start is not None:
            yield start, i
            start = None
