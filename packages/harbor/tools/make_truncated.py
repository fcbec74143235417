"""Regenerate specs/truncated.yaml: the whole ids of published tests that end inside a parameter.

Use: python tools/make_truncated.py DATA   (DATA holds logs/ and swe_bench_verified/)

676 ids of SWE-bench Verified end at a blank inside `[…]`. The recorded logs of the same test file
show whole ids: one for a published id is its repair; several make it ambiguous, none unseen, and
both are listed as they are.
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "src/nanoswe_harbor/specs/truncated.yaml"
LOGS = "verified_siflow_logs harness_v4_runs lite_gold_2024_logs"
BEGINNINGS = ("PASSED ", "FAILED ", "ERROR ", "XFAIL ")


def lines(path: Path) -> Any:
    with gzip.open(path, "rt") as stream:
        yield from map(json.loads, stream)


def main() -> None:
    data = Path(sys.argv[1])
    seen: dict[str, set[str]] = defaultdict(set)
    for name in LOGS.split():
        for run in lines(data / f"logs/{name}.jsonl.gz"):
            repo = run["instance_id"].rsplit("-", 1)[0]
            for line in (run.get("log") or run["test_output"]).split("\n"):
                if line.startswith(BEGINNINGS) and "[" in line:
                    whole = line.partition(" ")[2]
                    whole = whole.partition(" - ")[0] if line.startswith("FAILED") else whole
                    if whole.rstrip().endswith("]") and whole.split():
                        seen[f"{repo} {whole.split()[0]}"].add(whole.rstrip())
    found: dict[str, dict[str, Any]] = {"repaired": {}, "ambiguous": {}, "unseen": {}}
    for row in lines(data / "swe_bench_verified/test.jsonl.gz"):
        name = row["instance_id"]
        for test in json.loads(row["FAIL_TO_PASS"]) + json.loads(row["PASS_TO_PASS"]):
            if "[" not in test or test.endswith("]") or row["repo"] in ("django/django",):
                continue
            whole = seen[f"{name.rsplit('-', 1)[0]} {test}"]
            kind = ("unseen", "repaired", "ambiguous")[min(len(whole), 2)]
            if kind == "repaired":
                found[kind].setdefault(name, {})[test] = next(iter(whole))
            else:
                found[kind].setdefault(name, []).append(test)
    TARGET.write_text(json.dumps(found, indent=0, sort_keys=True, ensure_ascii=True) + "\n")
    counts = {kind: sum(map(len, rows.values())) for kind, rows in found.items()}
    sys.stdout.write(f"{counts}\n")


if __name__ == "__main__":
    main()
