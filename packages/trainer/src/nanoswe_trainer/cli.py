"""`nanoswe-trainer`: run a recipe, check one, export a run's weights.

Exit codes: 0 fine, 1 the run ended without what it was to show, 2 could not run (one line on stderr
says why), 130 interrupted (the run resumes). Progress goes to stderr, results to stdout.
"""

import asyncio
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

RUNS = click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"))
FALLBACK = click.option("--allowlist-fallback", is_flag=True, help="If no sandbox starts.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nanoswe-trainer")
def cli() -> None:
    """SFT and GRPO for coding agents."""


def _load(name: str, overrides: tuple[str, ...], folder: str = "train") -> Any:
    from nanoswe_evalkit.recipe import find_recipe, load_recipe
    from nanoswe_trainer.recipe import TrainRecipe

    return load_recipe(find_recipe(name, folder), overrides, TrainRecipe)


@cli.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@RUNS
@FALLBACK
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def run(
    recipe: str, overrides: tuple[str, ...], runs: Path, allowlist_fallback: bool,
    as_json: bool = False,
) -> None:  # fmt: skip
    """Run RECIPE (a name below recipes/train, or a path); run it again to resume."""
    from nanoswe_evalkit.report import write_report
    from nanoswe_evalkit.sandboxes import pick
    from nanoswe_evalkit.sandboxes.base import SandboxError
    from nanoswe_harbor.task import load_tasks
    from nanoswe_trainer.loop import train
    from nanoswe_trainer.view import View

    loaded = _load(recipe, overrides)
    if loaded.has_trials:
        load_tasks(loaded.tasks.path)  # before anything is written
    folder = runs / loaded.name
    folder.mkdir(parents=True, exist_ok=True)

    async def main(view: Any) -> Any:
        kind = "none"
        try:
            if loaded.has_trials:
                kind = await pick(loaded.sandbox.kind, folder / "work")
        except SandboxError as error:
            if not allowlist_fallback:
                raise
            kind, instead = "allowlist", "a few programs on a copy, and NO isolation."
            view.note(f"WARNING: {error}\nWARNING: `allowlist` instead: {instead}")
        return await train(loaded, folder, kind, view)

    with View() as view:
        summary = asyncio.run(main(view))
    if not summary:
        click.echo(folder / "export")
        return
    report = write_report(folder)
    shutil.rmtree(folder / "work", ignore_errors=True)
    if as_json:
        click.echo(json.dumps({**asdict(summary), "report": str(report)}))
    else:
        _print_summary(summary, report)


@cli.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@RUNS
@FALLBACK
@click.pass_context
def sft(context: click.Context, recipe: str, overrides: tuple[str, ...], **options: Any) -> None:
    """SFT only: on sft.data, or on demonstrations and with its evaluation."""
    from nanoswe_evalkit.recipe import find_recipe

    path = find_recipe(recipe, "sft")
    context.invoke(run, recipe=str(path), overrides=(*overrides, "train.steps=0"), **options)


@cli.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
def check(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print RECIPE resolved, what would run where, and what is missing (exit code 1)."""
    from nanoswe_evalkit.recipe import dump_recipe
    from nanoswe_trainer.check import check as look

    loaded = _load(recipe, overrides)
    facts, missing = look(loaded)
    lines = [*(f"# {fact}" for fact in facts), *(f"# MISSING: {what}" for what in missing)]
    click.echo(dump_recipe(loaded) + "\n".join(lines))
    sys.exit(1 if missing else 0)


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(run_dir: Path, out: Path) -> None:
    """Copy a finished run's model: a folder that transformers and vLLM load."""
    source = run_dir / "export"
    if not (source / "model.safetensors").exists():
        raise click.ClickException(f"{source}: no weights; finish the run (it resumes)")
    if out.exists():
        raise click.ClickException(f"{out} exists; name a new folder")
    shutil.copytree(source, out)
    click.echo(str(out))


def _print_summary(summary: Any, report: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    k = summary.before["sampled"]["k"]
    evaluations = [summary.before, summary.after] if summary.gains else [summary.before]
    table = Table(title="held-out tasks, 95 % intervals")
    for column in ("", "after SFT", "after RL", "gain")[: 4 if summary.gains else 2]:
        table.add_column(column)
    for kind, name in (("sampled", f"avg@{k}"), ("greedy", "greedy accuracy")):
        cells = [
            f"{e[kind]['avg_at_k']:.2f}  [{e[kind]['avg_low']:.2f}, {e[kind]['avg_high']:.2f}]"
            for e in evaluations
        ]
        if summary.gains:
            value, low, high = summary.gains[kind]
            cells.append(f"{value:+.2f}  [{low:+.2f}, {high:+.2f}]")
        table.add_row(name, *cells)
    shares = [e["sampled"]["pass_at_k"] for e in evaluations]
    gain = [f"{shares[-1] - shares[0]:+.2f}"] if summary.gains else []
    table.add_row(f"pass@{k}", *(f"{share:.2f}" for share in shares), *gain)
    lost = sum(e[kind]["trials_without_reward"] for e in evaluations for kind in e)
    tasks = summary.before["sampled"]["tasks"]
    table.caption = f"{tasks} tasks; {lost} trials without a reward (our machinery's failures)"
    Console().print(table)
    click.echo(f"report: {report}")


def main() -> None:
    """The console script: every expected error is one line."""
    from nanoswe_evalkit.cli import main as evalkit

    try:
        evalkit(cli)
    except ImportError as error:
        missing = f"{error.name} is not installed: pip install 'nanoswe-trainer[cpu]'"
        click.echo(f"error: {missing}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
