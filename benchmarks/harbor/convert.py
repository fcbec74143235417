"""Rows of SWE-bench Verified to task folders: how long, and the ratio to upstream's adapter.

Use: python benchmarks/harbor/convert.py ROWS.parquet PEER_PYTHON ADAPTER

PEER_PYTHON is an environment with swebench==4.1.0 and datasets, ADAPTER a copy of harbor's
adapters/swebench. Both are whole processes, start-up and all files included. The adapter wants the
hub and a code host: it gets the rows of the same file, and an empty answer at once for each file
that it would fetch (298 of 500 rows need one), which is less work than the real answer. Ours runs
once more over its own result. Prints wall and CPU seconds, and the ratio of CPU seconds.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEER = """
import pathlib, sys, types
import datasets, requests
source, adapter, out = sys.argv[1:]
load = datasets.load_dataset
datasets.load_dataset = lambda name: {"test": load("parquet", data_files=source, split="train")}
requests.get = lambda *args, **options: types.SimpleNamespace(status_code=200, text="")
sys.path.insert(0, adapter)
from adapter import SWEBenchToHarbor
converter = SWEBenchToHarbor(pathlib.Path(out))
done, failed = converter.generate_many(converter.get_all_ids())
sys.exit(bool(failed))
"""


def timed(*argv: str) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    began, before = time.monotonic(), cpu()
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        sys.exit(f"{argv[0]} failed: {(done.stderr or done.stdout)[-2000:]}")
    return time.monotonic() - began, cpu() - before


def written(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    tasks = sum((path / "task.toml").is_file() for path in folder.iterdir())
    return f"{tasks} tasks, {len(sizes)} files, {sum(sizes) / 1e6:.0f} MB"


def main() -> None:
    source, peer, adapter = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        one, two = Path(scratch, "verified"), Path(scratch, "upstream")
        ours = (sys.executable, "-m", "nanoswe_harbor", "convert", source, "--out", str(one))
        wall, cpu = timed(*ours, "--jobs", "2")
        again, _ = timed(*ours, "--jobs", "2")
        peer_wall, peer_cpu = timed(peer, "-c", PEER, source, adapter, str(two))
        sys.stdout.write(
            f"ours: {written(one)} in {wall:.1f} s wall, {cpu:.1f} s CPU;"
            f" {again:.1f} s when nothing has changed\n"
            f"upstream's adapter: {written(two)} in {peer_wall:.1f} s wall, {peer_cpu:.1f} s CPU\n"
            f"CPU seconds, theirs / ours: {peer_cpu / cpu:.2f}\n"
        )


if __name__ == "__main__":
    main()
