"""B3: the update of B1 with ever less equal sequences: the longest is about 1, 2, 4 and 8 times as
long as the average; CPU seconds of TRL's (micro-batch 4) over ours.

    python benchmarks/trainer/b3_skew.py --out benchmarks/trainer/b3.json    (needs trl==1.16.0)
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from result import tell

SCRIPT = Path(__file__).with_name("b1_update.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", default="2", help="the first warms up")
    parser.add_argument("--turns", default="1")
    parser.add_argument("--skews", nargs="+", default=["1", "2", "4", "8"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for skew in options.skews:
        command = [sys.executable, str(SCRIPT), "--skew", skew, "--sides", "ours", "trl4"]
        command += ["--steps", options.steps, "--turns", options.turns]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        kept = ("ratio", "tokens", "trained", "longest", "cpu_sec", "torch")
        rows.append({"skew": float(skew)} | {key: found[key] for key in kept})
        sys.stderr.write(f"{rows[-1]}\n")
    tell({"skews": rows}, options.out)


if __name__ == "__main__":
    main()
