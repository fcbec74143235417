"""The benchmark: exactness and latency of this proxy and of its peers, in one run.

    PEERS=A/bin/python:B/bin/python python benchmarks/proxy/run.py [--seeds 2] [--parts latency]

PEERS names the interpreters of environments that have peers installed; a peer that is in none is
left out and named. Out: results.json (all counts), table.md and chart.svg. The latency of one
system at a time may be measured again (`--parts latency --only NAME`), when the machine is quiet.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import httpx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "packages/proxy/tests")]

import families
from conftest import _bpe
from exactness import exactness
from latency import latency
from report import chart, table
from systems import AgentLightning, Litellm, OpenEnv, Ours, Rllm, Verifiers, bearer, rig

QWEN = "qwen3_instruct_2507"
PEERS = (Ours, Verifiers, Rllm, AgentLightning, OpenEnv)
FAMILIES = {QWEN: PEERS, "glm4moe": (Ours,), "mistral_tekken": (Ours,)}
# what was tried and cannot be run here; each line is what was seen
ABSENT = {
    "tokin 0.0.1": "installs; its wheel is 137 lines of data types, without a server",
    "miles-tito-tokenizers 0.1.1": "installs; encoders and comparators, without a server",
    "SkyRL 0.4.0": "no file of its wheel serves chat to an agent",
    "verl 0.9.1": "its wheel has the token layer and no gateway; uni-agent's is on no index",
    "AReaL 1.0.4": "wants torch < 2.11 with its GPU packages; its proxy asks its own engine, "
    "in process, and no server",
    "NeMo-Gym": "0.7.0 has no distribution for this Python; 0.4.0 was not driven",
    "prime-rl, miles, slime, labs-molt, Polar": "on no package index",
}


def note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def run(given: argparse.Namespace) -> None:
    """All that is wanted; the rest of the results stays as it is."""
    results = given.out / "results.json"
    found: dict = json.loads(results.read_text()) if results.exists() else {}
    found = {"exactness": {}, "latency": {}} | found | {"absent": dict(ABSENT)}
    limits, hooks = httpx.Limits(max_connections=50), {"request": [bearer]}
    async with httpx.AsyncClient(timeout=60, limits=limits, event_hooks=hooks) as http:
        for family, kinds in FAMILIES.items() if "exactness" in given.parts else ():
            async with engine(family) as (folder, url):
                for kind in (k for k in kinds if given.only in k.name):
                    name = kind.name if family == QWEN else f"{kind.name}, {family}"
                    await one(found, "exactness", name, kind, (url, folder, http), given.seeds)
                    save(found, given)
        wanted = [k for k in (*PEERS, Litellm) if given.only in k.name]
        async with engine(QWEN, "--fast", "--context", "200000") as (folder, url):
            for kind in wanted if "latency" in given.parts else ():
                await one(found, "latency", kind.name, kind, (url, folder, http))
                save(found, given)


@asynccontextmanager
async def engine(family: str, *options: str):
    """(model folder, URL) of an engine of that family."""
    folder = families.folder(family, _bpe(), Path(tempfile.mkdtemp()) / "tiny")
    process = rig(folder, *options)
    try:
        yield folder, await process.url()
    finally:
        process.stop()


async def one(found: dict, part: str, name: str, kind, where: tuple, *options) -> None:
    """Measure one system; one that does not start is named with what it said."""
    measure = {"exactness": exactness, "latency": latency}[part]
    system = None
    try:
        system = kind(*where)
        await system.start()
        note(f"{part}: {name}")
        scores = await measure(system, *where, *options)
        plain = json.loads(json.dumps(scores, default=counts))
        found[part][name] = {"commit": commit(), **plain}
    except RuntimeError as error:
        found["absent"][name] = str(error)
    finally:
        if system:
            system.stop()


def save(found: dict, given: argparse.Namespace) -> None:
    (given.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "table.md").write_text(table(found))
    (given.out / "chart.svg").write_text(chart(found))


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=2, help="per case")
    options.add_argument("--out", type=Path, default=HERE)
    parts = ["exactness", "latency"]
    options.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options.add_argument("--only", default="", help="systems with this in their name")
    given = options.parse_args()
    asyncio.run(run(given))
    sys.stdout.write((given.out / "table.md").read_text())


def counts(score) -> dict:
    return asdict(score) | {"table": score.table()}


if __name__ == "__main__":
    main()
