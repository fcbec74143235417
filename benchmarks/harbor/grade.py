"""Recorded logs through the grader: does it agree with the record, and how fast is it?

Use: python benchmarks/harbor/grade.py DATA [--write]      (DATA: the folder with logs/ and rows)

Prints a table of agreement by repository and parser, and megabytes of log per CPU second. With
--write the table replaces the one in packages/harbor/docs/grading.md.
"""

import gzip
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoswe_harbor.families import parser_of
from nanoswe_harbor.grader.grade import grade

PAGE = Path(__file__).parents[2] / "packages/harbor/docs/grading.md"
BEGIN, END = "<!-- agreement: written by benchmarks/harbor/grade.py -->\n", "<!-- end -->\n"
ROWS = "swe_bench_verified/test.jsonl.gz swe_bench_lite/dev.jsonl.gz swe_bench_lite/test.jsonl.gz"
HEAD = "| logs | repository | parser | status maps | lists | resolved |\n|---|---|---|--:|--:|--:|"
KEYS = {"FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "pass_to_pass"}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        yield from map(json.loads, stream)


def repo_of(instance_id: str) -> str:
    owner, rest = instance_id.split("__", 1)
    return f"{owner}/{rest.rsplit('-', 1)[0]}"


def expected(rows: dict[str, Any], name: str) -> dict[str, Any]:
    row = rows.get(name, {})
    lists = {ours: json.loads(row.get(theirs, "[]")) for theirs, ours in KEYS.items()}
    return {"parser": parser_of(repo_of(name)), **lists}


def lists_of(status: dict[str, Any]) -> dict[str, Any]:
    """The recorded lists as ours: {"fail_to_pass": {"success": …, "failure": …}, …}."""
    return {ours: {k: status[key][k] for k in ("success", "failure")} for key, ours in KEYS.items()}


def judged(data: Path) -> Iterator[tuple[str, str, str, str, bool]]:
    """(file, repository, parser, what was compared, equal?) for every comparison."""
    logs = data / "logs"
    rows = {r["instance_id"]: r for name in ROWS.split() for r in lines(data / name)}
    for run in lines(logs / "harness_v4_runs.jsonl.gz"):
        name, report = run["instance_id"], run["report"]
        wanted = expected(rows, name)
        got = grade(run["test_output"], wanted, official=True)
        key = ("harness_v4_runs", repo_of(name), wanted["parser"])
        yield *key, "resolved", got["resolved"] == report["resolved"]
        yield *key, "status map", got["status"] == run["status_map"]
        lists = lists_of(report["tests_status"])
        yield *key, "lists", {ours: got[ours] for ours in KEYS.values()} == lists
    for run in lines(logs / "verified_siflow_logs.jsonl.gz"):
        name = run["instance_id"]
        wanted = expected(rows, name)
        got = grade(run["log"], wanted, official=True)
        key = ("verified_siflow_logs", repo_of(name), wanted["parser"])
        yield *key, "status map", got["status"] == run["status_map"]
        yield *key, "resolved", got["resolved"] == (run["resolution"] == "RESOLVED_FULL")
        yield *key, "lists", {ours: got[ours] for ours in KEYS.values()} == lists_of(run["report"])
    for run in lines(logs / "lite_gold_2024_logs.jsonl.gz"):
        name = run["instance_id"]
        wanted = expected(rows, name)
        got = grade(run["log"], wanted, official=True)
        key = ("lite_gold_2024_logs", repo_of(name), wanted["parser"])
        yield *key, "status map", got["status"] == run["status_map"]
        yield *key, "lists", {ours: got[ours] for ours in KEYS.values()} == lists_of(run["report"])
        if (run["resolution"] == "RESOLVED_FULL") == run["recorded_resolved"]:
            yield *key, "resolved", got["resolved"] == run["recorded_resolved"]
    for run in lines(logs / "swe_gym_openhands_eval_logs.jsonl"):
        key = ("swe_gym_openhands_eval_logs", run["repo"], parser_of(run["repo"]))
        got = grade(run["test_output"], expected({}, run["instance_id"]), official=True)
        yield *key, "status map", got["status"] == run["status_map"]
    for run in lines(logs / "swe_smith_eval_logs.jsonl.gz"):
        repo = "swesmith/" + run["instance_id"].split(".")[0]
        lists = lists_of(run["report"]["tests_status"])
        wanted = {ours: sum(lists[ours].values(), []) for ours in lists}
        got = grade(run["test_output"], {"parser": parser_of(repo), **wanted}, official=True)
        key = ("swe_smith_eval_logs", repo, parser_of(repo))
        yield *key, "resolved", got["resolved"] == run["report"]["resolved"]
        yield *key, "lists", {ours: got[ours] for ours in lists} == lists


def table(data: Path) -> tuple[str, int]:
    """The table as markdown, and the number of comparisons that differ."""
    counts: dict[tuple[str, ...], Counter] = defaultdict(Counter)
    for file, repo, parser, what, equal in judged(data):
        counts[file, repo, parser][what] += 1
        counts[file, repo, parser][what, "equal"] += equal
    rows = [
        "| logs | repository | parser | status maps | lists | resolved |",
        "|---|---|---|--:|--:|--:|",
    ]
    wrong = 0
    for (file, repo, parser), count in sorted(counts.items()):
        cells = []
        for what in ("status map", "lists", "resolved"):
            cells.append(f"{count[what, 'equal']}/{count[what]}" if count[what] else "-")
            wrong += count[what] - count[what, "equal"]
        rows.append(f"| {file} | {repo} | {parser} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n", wrong


def speed(data: Path) -> dict[str, float]:
    """Megabytes of log per CPU second for each parser, over the recorded logs."""
    rows = {r["instance_id"]: r for name in ROWS.split() for r in lines(data / name)}
    texts: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for file in ("harness_v4_runs", "verified_siflow_logs", "lite_gold_2024_logs"):
        for run in lines(data / f"logs/{file}.jsonl.gz"):
            wanted = expected(rows, run["instance_id"])
            texts[wanted["parser"]].append((run.get("log") or run["test_output"], wanted))
    texts["all"] = [pair for pairs in texts.values() for pair in pairs]
    rates = {}
    for parser, pairs in texts.items():
        size = sum(len(log.encode()) for log, _ in pairs)
        rounds = max(1, int(30e6 / size))
        began = time.process_time()
        for _ in range(rounds):
            for log, wanted in pairs:
                grade(log, wanted, official=True)
        rates[parser] = size * rounds / (time.process_time() - began) / 1e6
    return rates


def main() -> int:
    data = Path(sys.argv[1])
    text, wrong = table(data)
    rates = speed(data)
    text += "\n| parser | MB of log per CPU second |\n|---|--:|\n"
    text += "".join(f"| {parser} | {rate:.0f} |\n" for parser, rate in sorted(rates.items()))
    sys.stdout.write(f"{text}\n{wrong} comparisons differ\n")
    if "--write" in sys.argv:
        page = PAGE.read_text()
        pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.S)
        PAGE.write_text(pattern.sub(lambda _: BEGIN + "\n" + text + "\n" + END, page))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
