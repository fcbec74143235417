"""A chart of each result that is there: benchmarks/trainer/b*.json to b*.svg. Needs matplotlib."""

import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "nano-swe"  # the same file from the same numbers
HERE = Path(__file__).parent
OURS, PEER = "#2a6f97", "#adb5bd"


def bars(name: str, title: str, values: dict[str, float], ours: str) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(values) + 1.2))
    colours = [OURS if ours in label else PEER for label in values]
    axes.barh(list(values), list(values.values()), color=colours)
    axes.bar_label(axes.containers[0], padding=3, fmt="%g")
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, name)


def save(figure: pyplot.Figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def b1(found: dict) -> None:
    rates = found["trained_tokens_per_cpu_sec"]
    title = (
        f"B1: tokens trained a CPU second, GRPO update, 4.4 M parameters ({found['ratio']} times)"
    )
    names = {"ours": "nano-swe", "trl4": "TRL, micro-batch 4", "trl8": "TRL, micro-batch 8"}
    bars("b1", title, {names[side]: rate for side, rate in rates.items()}, "nano-swe")


def b4(found: list[dict]) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 3))
    for head, colour in (("chunks", OURS), ("plain", PEER)):
        rows = [row for row in found if row["head"] == head]
        line = [row["vocabulary"] for row in rows], [row["peak_gib"] for row in rows]
        axes.plot(*line, "o-", color=colour, label=f"head in {head}" if head == "chunks" else head)
    axes.set_title("B4: peak memory (GiB) of an update of 8,192 tokens, by vocabulary", loc="left",
                   fontsize=10)  # fmt: skip
    axes.set_ylim(0)
    axes.legend(frameon=False)
    save(figure, "b4")


def b3(found: dict) -> None:
    values = {f"longest / average {row['skew']:g}": row["ratio"] for row in found["skews"]}
    bars("b3", "B3: TRL's CPU seconds over nano-swe's, by skew of lengths", values, "longest")


def sampled(name: str, title: str, found: dict) -> None:
    rates = found["tokens_per_cpu_sec"]
    names = {"ours": "nano-swe's engine", "transformers": "transformers.generate, turn by turn"}
    title = f"{name.upper()}: tokens sampled a CPU second, {title} ({found['ratio']} times)"
    bars(name, title, {names[side]: rate for side, rate in rates.items()}, "nano-swe")


def b5(found: dict) -> None:
    sampled("b5", "32 replies of one length", found)


def b6(found: dict) -> None:
    sampled("b6", "ragged six-turn conversations", found)


def b7(found: dict) -> None:
    title = f"B7: CPU seconds to a reward of .9 on a toy task ({found['ratio']} times)"
    names = {"ours": "nano-swe", "trl": "TRL"}
    bars("b7", title, {names[side]: sec for side, sec in found["cpu_sec"].items()}, "nano-swe")


def b8(found: list[dict]) -> None:
    rows = [row for row in found if row["sigma"] == 1.0 and row["depth"] == 4]
    values = {}
    for row in rows:
        label = f"{row['policy']}: age at most {row['age_max']}"
        if row["dropped"]:
            label += f", {row['dropped']:.0%} dropped"
        values[label] = row["steps_per_hour"]
    order = dict(sorted(values.items(), key=lambda item: item[1]))
    bars("b8", "B8: steps an hour, pipeline of four, lognormal latencies", order, "deadline")


for draw in (b1, b3, b4, b5, b6, b7, b8):
    result = HERE / f"{draw.__name__}.json"
    if result.exists():
        draw(json.loads(result.read_text()))
