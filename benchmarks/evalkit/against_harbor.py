"""The same tasks, solved by their oracle, under upstream's `harbor run` and under evalkit.

Use: python benchmarks/evalkit/against_harbor.py [--tasks 24] [--write]

Needs Docker, with debian:bookworm-slim, and Python >= 3.12 for upstream's harbor (tools/harbor puts
it into .nox/harbor-cli). Every task is a nano task; for Docker its repository is in an image of its
own, once with the default stop signal and once with SIGKILL. Two trials at once. Prints trials per
minute of whole commands, imports and all; the ratios; and what a trial costs beyond its agent and
its tests. With --write that goes into results.json beside this file.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from nanoswe_harbor.checkout import checkout
from nanoswe_harbor.convert import convert_nano
from nanoswe_harbor.task import load_tasks

ROOT = Path(__file__).resolve().parents[2]
BASE = """\
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends git python3 > /dev/null
ENTRYPOINT []
"""
SIGNALS = {"default": "", "sigkill": "STOPSIGNAL SIGKILL\n"}
ENV = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
RECIPE = """\
name: {name}
tasks: {{path: {tasks}}}
agent: {{kind: oracle}}
sandbox: {{kind: {kind}}}
eval: {{concurrency: 2}}
"""


def command(*argv: str, stdin: str = "") -> str:
    env = {**os.environ, **ENV}
    done = subprocess.run(argv, input=stdin, text=True, capture_output=True, env=env, check=False)
    if done.returncode:
        sys.exit(f"{argv}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def make_images(folder: Path, nano: Path) -> list[str]:
    """Two datasets in `folder`, each task with its repository in an image; the images."""
    tags = []
    for signal, line in SIGNALS.items():
        base = f"nanoswe-bench/base:{signal}"
        command("docker", "build", "-q", "-t", base, "-", stdin=BASE + line)
        for task in load_tasks(nano / "train"):
            tree, out = folder / "trees" / task.task_id, folder / signal / task.task_id
            if not tree.exists():
                checkout(task.repo, task.base_commit, nano / "mirror", tree)
            tag = f"nanoswe-bench/{task.task_id.lower()}:{signal}"
            text = f"FROM {base}\nCOPY . /testbed\nWORKDIR /testbed\n"
            command("docker", "build", "-q", "-t", tag, "-f", "-", str(tree), stdin=text)
            tags.append(tag)
            shutil.copytree(task.path, out)
            settings, recipe = out / "task.toml", out / "environment" / "Dockerfile"
            pattern, image = r'(docker_image = )"[^"\n]*"', rf'\1"{tag}"'
            settings.write_text(re.sub(pattern, image, settings.read_text()))
            recipe.write_text(re.sub(r"^FROM .*", f"FROM {tag}", recipe.read_text(), flags=re.M))
    return tags


def under_harbor(folder: Path, tasks: Path, name: str) -> list[tuple[float, float]]:
    """Upstream, as it comes. (reward, overhead in seconds) of each trial."""
    harbor = str(ROOT / ".nox/harbor-cli/bin/harbor")
    jobs = folder / "jobs"
    command(
        harbor, "run", "-p", str(tasks), "-a", "oracle", "-n", "2", "-q", "-y",
        "--jobs-dir", str(jobs), "--job-name", name,
    )  # fmt: skip
    trials = [json.loads(path.read_text()) for path in jobs.glob(f"{name}/*/result.json")]

    def seconds(span: dict[str, str]) -> float:
        began, ended = (datetime.fromisoformat(span[k]) for k in ("started_at", "finished_at"))
        return (ended - began).total_seconds()

    return [
        (
            trial["verifier_result"]["rewards"]["reward"],
            seconds(trial) - seconds(trial["agent_execution"]) - seconds(trial["verifier"]),
        )
        for trial in trials
    ]


def under_evalkit(folder: Path, tasks: Path, name: str, kind: str) -> list[tuple[float, float]]:
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(name=name, tasks=tasks, kind=kind))
    runs = str(folder / "runs")
    command(sys.executable, "-m", "nanoswe_evalkit.cli", "run", str(recipe), "--runs", runs)
    lines = (folder / "runs" / name / "trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    return [
        (t["reward"], c["total_sec"] - c["agent_sec"] - c["install_sec"] - c["tests_sec"])
        for t in trials
        for c in [t["timings"]]
    ]


def measure(run: Callable[[], list[tuple[float, float]]], count: int) -> dict[str, float]:
    began = time.monotonic()
    trials = run()
    wall = time.monotonic() - began
    if [reward for reward, _ in trials] != [1.0] * count:
        sys.exit(f"not every trial was solved: {trials}")
    costs = [cost for _, cost in trials]
    return {
        "wall_sec": round(wall, 1),
        "trials_per_minute": round(60 * count / wall, 1),
        "overhead_sec_median": round(statistics.median(costs), 2),
        "overhead_sec_max": round(max(costs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    command(str(ROOT / "tools/harbor"), str(ROOT / ".nox/harbor-cli"))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="nanoswe-bench-") as name:
        folder = Path(name)
        nano = folder / "nano"
        convert_nano(nano, {"train": options.tasks, "heldout": 1})
        tags = make_images(folder, nano)
        try:
            for signal in SIGNALS:
                tasks = folder / signal
                ways = {
                    f"evalkit docker, {signal}": lambda t=tasks, s=signal: under_evalkit(
                        folder, t, f"docker-{s}", "docker"
                    ),
                    f"harbor run, {signal}": lambda t=tasks, s=signal: under_harbor(folder, t, s),
                }
                for label, way in ways.items():
                    results[label] = measure(way, options.tasks)
                    print(label, results[label], file=sys.stderr, flush=True)
            way = "evalkit bwrap"
            results[way] = measure(
                lambda: under_evalkit(folder, nano / "train", "bwrap", "bwrap"), options.tasks
            )
        finally:
            command("docker", "rmi", "-f", *tags)
    rates = {label: result["trials_per_minute"] for label, result in results.items()}
    ratios = {
        "docker, default images": ("evalkit docker, default", "harbor run, default", 5),
        "docker, SIGKILL images": ("evalkit docker, sigkill", "harbor run, sigkill", 2),
        "bwrap": ("evalkit bwrap", "harbor run, default", 20),
    }
    results["ratios"] = {
        name: {"ratio": round(rates[ours] / rates[theirs], 1), "bar": bar}
        for name, (ours, theirs, bar) in ratios.items()
    }
    results["tasks"] = options.tasks
    results["commit"] = command("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    text = json.dumps(results, indent=1)
    print(text)
    if options.write:
        Path(__file__).with_name("results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
