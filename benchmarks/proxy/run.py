"""The benchmark: exactness and latency of this proxy and of its peers, in one run.

    PEERS=A/bin/python:B/bin/python python benchmarks/proxy/run.py [--seeds 3] [--out DIR]

PEERS names the interpreters of environments that have peers installed; a peer that is in none is
left out and named. Out: results.json (all counts), table.md and chart.svg.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import httpx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "packages/proxy/tests")]

from conftest import _bpe
from exactness import exactness
from latency import latency
from report import chart, table
from systems import Litellm, Ours, Rllm, rig


def note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def run(given: argparse.Namespace) -> dict:
    folder = Path(tempfile.mkdtemp())
    _bpe().save(str(folder / "tokenizer.json"))
    found: dict = {"commit": commit(), "seeds": given.seeds, "exactness": {}, "latency": {},
                   "absent": {}}  # fmt: skip
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:
        engine = rig(folder)
        url = await engine.url()
        for kind in (Ours, Rllm):
            await one(found, "exactness", kind, url, folder, http,
                      lambda system: exactness(system, url, http, given.seeds))  # fmt: skip
        engine.stop()
        if given.latency:
            engine = rig(folder, "--fast", "--context", "200000")
            url = await engine.url()
            for kind in (Ours, Rllm, Litellm):
                await one(found, "latency", kind, url, folder, http,
                          lambda system: latency(system, url, folder, http))  # fmt: skip
            engine.stop()
    return found


async def one(found: dict, part: str, kind, url: str, folder: Path, http, measure) -> None:
    try:
        system = kind(url, folder, http)
    except RuntimeError as error:
        found["absent"][kind.name] = str(error)
        return
    try:
        await system.start()
        note(f"{part}: {kind.name}")
        found[part][kind.name] = await measure(system)
    finally:
        system.stop()


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--out", type=Path, default=HERE)
    options.add_argument("--latency", action=argparse.BooleanOptionalAction, default=True)
    given = options.parse_args()
    found = asyncio.run(run(given))
    plain = json.dumps(found, indent=1, default=asdict)
    (given.out / "results.json").write_text(plain + "\n")
    text = table(found)
    (given.out / "table.md").write_text(text)
    (given.out / "chart.svg").write_text(chart(json.loads(plain)))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
