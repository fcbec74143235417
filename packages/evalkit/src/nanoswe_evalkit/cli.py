"""The command line: run, verify, regrade, report, compare.

In: a recipe (file, or a name below recipes/eval) and overrides, or run folders. Out: tables on
stdout (`--json` for machines), progress on stderr; exit code 0 fine, 1 ran and found failures, 2
could not run, 130 interrupted. Every error is one line, never a traceback.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.logging import RichHandler

from nanoswe_evalkit import __version__
from nanoswe_evalkit.outcome import EvalkitError
from nanoswe_evalkit.recipe import EvalRecipe, Recipe, find_recipe, load_recipe, make_recipe

as_json = click.option("--json", "as_json", is_flag=True, help="print JSON")
run_folder = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nanoswe-evalkit")
def cli() -> None:
    """Run agents on SWE tasks in sandboxes, grade with the real tests, count honestly."""


@cli.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--runs", default="runs", type=run_folder, show_default=True, help="where runs go")
@as_json
def run(recipe: str, overrides: Sequence[str], runs: Path, as_json: bool) -> None:
    """Run RECIPE (a file or a name) with section.key=value overrides; run again to resume."""
    from nanoswe_evalkit.evaluate import evaluate

    key = os.environ.get("OPENAI_API_KEY", "")
    loaded = load_recipe(find_recipe(recipe, "eval"), overrides, EvalRecipe)
    summary = asyncio.run(evaluate(loaded, runs / loaded.name, Console(stderr=True), key))
    _end(summary, _summary_lines(summary), as_json, failed=bool(summary["no_reward"]))


@cli.command()
@click.argument("tasks", type=run_folder)
@click.argument("overrides", nargs=-1)
@click.option("--times", default=3, show_default=True, type=click.IntRange(1, 100))
@as_json
def verify(tasks: Path, overrides: Sequence[str], times: int, as_json: bool) -> None:
    """Check that the gold patch scores 1 and nothing scores 0, every time, for every task; name
    the liars. Overrides as for run. What was found is in TASKS/certificates.jsonl.
    """
    from nanoswe_evalkit.verify import certify

    given = {"name": "verify", "tasks": {"path": tasks}, "agent": {"kind": "oracle"}}
    recipe = make_recipe({**given, "eval": {"attempts": times}}, overrides, Recipe, "verify")
    held, lost = asyncio.run(certify(recipe, Console(stderr=True)))
    liars = [{**vars(c), "verdict": c.verdict} for c in held.values() if c.verdict != "certified"]
    lines = [f"{c['task_id']}: {c['verdict']} {c['why']}" for c in liars]
    for words in ("wrong_labels", "flaky_tests"):
        found = ((c.task_id, getattr(c, words)) for c in held.values())
        lines += [f"{task}: {words.replace('_', ' ')} {', '.join(ts)}" for task, ts in found if ts]
    lines += lost
    told = {"certified": len(held) - len(liars), "liars": liars, "lost": lost}
    lines.append(f"{told['certified']} of {len(held)} tasks certified; {len(lost)} trials lost")
    _end(told, lines, as_json, failed=bool(liars or lost))


@cli.command()
@click.argument("folder", type=run_folder)
@as_json
def regrade(folder: Path, as_json: bool) -> None:
    """Judge the stored logs of run FOLDER again, into regraded.jsonl, and count again; 1 if a
    verdict changed.
    """
    from nanoswe_evalkit.evaluate import regrade_run

    changed, summary = regrade_run(folder)
    lines = [f"{c['trial_id']}: {c['before']} → {c['after']}" for c in changed]
    lines += [f"{summary['trials']} trials, {len(changed)} changed", *_summary_lines(summary)]
    _end({**summary, "changed": changed}, lines, as_json, failed=bool(changed))


@cli.command()
@click.argument("folder", type=run_folder)
@as_json
def report(folder: Path, as_json: bool) -> None:
    """Write report.html of run FOLDER."""
    from nanoswe_evalkit.report import write_report

    path = str(write_report(folder))
    _end({"report": path}, [path], as_json)


@cli.command()
@click.argument("a", type=run_folder)
@click.argument("b", type=run_folder)
@as_json
def compare(a: Path, b: Path, as_json: bool) -> None:
    """Paired difference in avg@k of run B minus run A, and the tasks where they disagree."""
    from nanoswe_evalkit.passk import counts_of, no_headline, paired_difference
    from nanoswe_evalkit.runner import read_trials

    runs = [read_trials(folder / "trials.jsonl") for folder in (a, b)]
    (left, right), lost = map(counts_of, runs), [no_headline(trials) for trials in runs]
    try:
        d = paired_difference(left, right)
    except ValueError as error:
        raise EvalkitError(f"{a}, {b}: {error}") from error
    shares = {t: [c / n for n, c in (left[t], right[t])] for t in sorted(left.keys() & right)}
    discordant = {task: share for task, share in shares.items() if share[0] != share[1]}
    lines = [f"difference {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}] over {d.tasks} tasks"]
    lines += [f"  {task}: {x:.2f} → {y:.2f}" for task, (x, y) in discordant.items()]
    lines += [f"{run}: {text}" for run, text in zip((a, b), lost, strict=True) if text]
    _end({**vars(d), "discordant": discordant, "no_headline": lost}, lines, as_json)


def _end(result: Any, lines: Sequence[str], as_json: bool, failed: bool = False) -> None:
    click.echo(json.dumps(result) if as_json else "\n".join(lines))
    sys.exit(failed)


def _summary_lines(summary: dict[str, Any]) -> list[str]:
    scores, lost = summary["scores"].items(), summary["no_reward"]
    lines = [f"{name:20} {e['value']:.3f}  [{e['low']:.3f}, {e['high']:.3f}]" for name, e in scores]
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    lines.append(f"{summary['tasks']} tasks, {summary['trials']} trials: {outcomes}")
    lines += [f"{summary['certified']} tasks certified"] * bool(summary["certified"])
    lines.append(f"{lost} without a reward ({summary['infra_rate']:.1%}): our machinery failed")
    return [*lines, f"headline: {summary['headline'] or summary['no_headline']}"]


def main(group: click.Group = cli) -> None:
    """Errors end here, as one line and an exit code; those of the trainer's commands too."""
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    try:
        group(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}; --help says more", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort, asyncio.CancelledError):
        click.echo("interrupted: run the same command again to resume", err=True)
        sys.exit(130)
    except Exception as error:
        known = _root(error)
        if known is None:
            raise
        click.echo(f"error: {' '.join(str(known).split())}", err=True)
        sys.exit(2)


def _root(error: BaseException) -> BaseException | None:
    """The error we know how to say in one line; a task group wraps it."""
    if isinstance(error, BaseExceptionGroup):
        return _root(error.exceptions[0])
    ours = type(error).__module__.startswith("nanoswe_")
    return error if ours or isinstance(error, OSError) else None


if __name__ == "__main__":
    main()
