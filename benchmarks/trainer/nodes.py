"""A run whose ranks, engine and trials are on three nodes of a Ray cluster of this machine
(`ray.cluster_utils.Cluster`; each node has one CPU, so no two of them share one), gloo between the
ranks. Prints what ran on which node, and the run's steps.

    python benchmarks/trainer/nodes.py --out benchmarks/trainer/nodes.json       (needs ray)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from result import tell

from nanoswe_harbor.convert import convert_nano
from nanoswe_trainer import tiny

RECIPE = """
name: nodes
tasks: {path: TASKS/train, limit: 2}
agent: {max_turns: 2}
model: {max_tokens: 16}
eval: {attempts: 1, concurrency: 4}
sft: {steps: 8, batch: 8, warmup_steps: 1, muon_learning_rate: 0}
train: {steps: 3, groups: 2, group_size: 2, preset: distill, teacher: TASKS/teacher}
cluster: {backend: ray, ranks: 2, train_threads: 1, max_context: 192}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    store = {"object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **store})
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
    ray.init(address=cluster.address, log_to_driver=False)
    names = {node["NodeID"]: f"node {i}" for i, node in enumerate(ray.nodes())}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_nano(folder, {"train": 2, "heldout": 1})
        tiny.create(folder / "teacher", seed=5)  # each step learns, whatever the rewards
        (folder / "nodes.yaml").write_text(RECIPE.replace("TASKS", name))
        command = [sys.executable, "-m", "nanoswe_trainer.cli", "run", str(folder / "nodes.yaml"),
                   "--runs", name, "--allowlist-fallback"]  # fmt: skip
        run = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": cluster.address})
        where: dict[str, str] = {}
        while run.poll() is None:
            for key, actor in actors().items():
                where[f"{actor['ActorClassName']} {key[:6]}"] = actor["Address"]["NodeID"]
            time.sleep(0.5)
        lines = (folder / "nodes/metrics.jsonl").read_text().splitlines()
    placed = {actor: names[node] for actor, node in where.items() if node in names}
    steps = [
        {k: row[k] for k in ("stage", "step", "loss", "trained_tokens") if k in row}
        for row in map(json.loads, lines) if row["stage"] != "eval"
    ]  # fmt: skip
    result = {"nodes": len(names), "exit": run.returncode, "placed": placed, "steps": steps}
    tell(result | {"ray": ray.__version__}, options.out)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
