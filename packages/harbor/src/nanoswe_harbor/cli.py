"""The command line: convert, show, verify-format, grade, images.

In: arguments. Out: results on stdout (`--json` for machines), progress on stderr, exit code 0 fine,
1 ran and found failures, 2 could not run. Every error is one line, `error: …`, never a traceback.
"""

import asyncio
import functools
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from nanoswe_harbor import __version__
from nanoswe_harbor.instance import HarborError

COUNT, FOLDER = click.IntRange(1), click.Path(path_type=Path)
COLUMNS = (*Progress.get_default_columns(), MofNCompleteColumn())
as_json = click.option("--json", "as_json", is_flag=True, help="print JSON")
registry_url = click.option("--registry", default="", help="URL that stands for the public one")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nanoswe-harbor")
def cli() -> None:
    """SWE datasets in, Harbor tasks out."""


@cli.command()
@click.argument("source")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder to write")
@click.option("--limit", type=COUNT, help="take the first rows only")
@click.option("--only", multiple=True, help="take rows whose id matches; repeatable, * is any")
@click.option("--sample", type=COUNT, help="take so many rows, the same ones on every machine")
@click.option("--stratify", type=click.Choice(["repo"]), help="sample: a fair share of each")
@click.option("--seed", default=0, show_default=True, help="of the sample, or of nano")
@click.option("--jobs", default=1, show_default=True, type=COUNT, help="threads")
@click.option("--images", type=click.Choice(["published", "built"]), default="published")
@click.option("--mirror", default="", help="bare repositories, or a URL: rows are checked there")
@click.option("--train", default=96, show_default=True, type=COUNT, help="nano: train tasks")
@click.option("--heldout", default=64, show_default=True, type=COUNT, help="nano: held-out tasks")
@as_json
def convert(source: str, out: Path, as_json: bool, **given: Any) -> None:
    """Write SOURCE as Harbor tasks: nano, verified, lite, swegym, a hub name, a folder of tasks,
    .parquet, .jsonl[.gz|.zst] or - for JSON lines on stdin. Rows that cannot be tasks are listed
    in OUT/rejected.jsonl, and the exit code is 1."""
    from nanoswe_harbor.convert import convert as convert_rows
    from nanoswe_harbor.convert import convert_nano
    from nanoswe_harbor.sources import Rejected, label, scan, select

    with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
        job = bar.add_task(f"convert {label(source)}", total=None)
        counts = {split: given.pop(split) for split in ("train", "heldout")}
        options = {key: given.pop(key) for key in ("images", "jobs", "mirror")}
        if source == "nano":
            tasks = convert_nano(out, counts, given["seed"], lambda: bar.advance(job))
            unchanged, rejected = 0, list[Rejected]()
        else:
            rows, told = select(scan(source), **given), lambda: bar.advance(job)
            tasks, unchanged, rejected = convert_rows(rows, out, label(source), told, **options)
    result = {"source": label(source), "out": str(out), "tasks": tasks, "unchanged": unchanged}
    text = f"{tasks} tasks in {out}" + f", {unchanged} unchanged" * bool(unchanged)
    click.echo(json.dumps({**result, "rejected": len(rejected)}) if as_json else text)
    if rejected:
        first = f"{rejected[0].where}: {rejected[0].reason}"
        more = f"{len(rejected)} rows are no tasks, see {out / 'rejected.jsonl'}"
        click.echo(f"error: {more}; the first: {first}", err=True)
        sys.exit(1)


@cli.command()
@click.argument("source")
@click.argument("instance_id", required=False)
@as_json
def show(source: str, instance_id: str | None, as_json: bool) -> None:
    """Show a task folder, or row INSTANCE_ID of a SOURCE."""
    from nanoswe_harbor.sources import read_row
    from nanoswe_harbor.task import load_task

    if instance_id is None:
        fields = dict(vars(load_task(source)))
    else:
        fields = read_row(source, instance_id).model_dump()
    if as_json:
        click.echo(json.dumps(fields, indent=1, ensure_ascii=False, default=str))
        return
    for key, value in fields.items():
        text = ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
        click.echo(f"{key + ':':<24}{shorten(text, 100, placeholder=' ...')}")


@cli.command("verify-format")
@click.argument("folder", type=click.Path(path_type=Path))
@as_json
def verify_format(folder: Path, as_json: bool) -> None:
    """Check that every task below FOLDER keeps what its shape promises; name those that do not."""
    from nanoswe_harbor.promises import format_faults

    checked, faults = format_faults(folder)
    if as_json:
        click.echo(json.dumps({"tasks": checked, "faults": faults}, indent=1))
    else:
        for name, fault in faults.items():
            click.echo(f"{name}: {fault}")
        click.echo(f"{checked - len(faults)} of {checked} tasks are whole")
    sys.exit(1 if faults else 0)


@cli.command()
@click.argument("log", required=False, type=click.Path(path_type=Path))
@click.argument("task", required=False, type=click.Path(path_type=Path))
@click.option("--nonce", help="with LOG TASK: accept only markers with this nonce")
@click.option("--rows", help="a source of rows whose test lists decide, instead of TASK")
@click.option("--instance", help="with --rows and --log: the row's id")
@click.option("--log", "log_file", type=click.Path(path_type=Path), help="one log")
@click.option("--logs", type=click.Path(path_type=Path), help=".jsonl: instance_id, test_output")
@as_json
def grade(as_json: bool, nonce: str | None, **given: Any) -> None:
    """Judge LOG, the output of run_eval.sh, by TASK; or recorded logs by rows."""
    from nanoswe_harbor.sources import read_row
    from nanoswe_harbor.verdicts import judge, judge_logs, judge_task, read_log

    match {name: value for name, value in given.items() if value}:
        case {"log": log, "task": task, **rest} if not rest:
            _print_verdicts([judge_task(task, read_log(log), nonce)], as_json)
        case {"rows": rows, "logs": logs, **rest} if not rest:
            _print_verdicts(judge_logs(rows, logs), as_json)
        case {"rows": rows, "instance": name, "log_file": log, **rest} if not rest:
            _print_verdicts([judge(read_row(rows, name), read_log(log))], as_json)
        case _:
            raise click.UsageError(
                "give LOG TASK, --rows FILE --instance ID --log FILE, or --rows FILE --logs FILE"
            )


@cli.command()
@click.argument("source")
@click.option("--only", multiple=True, help="take images named owner__repo-version; * is any")
@click.option("--print", "prints", is_flag=True, help="print what bake would build; no daemon")
@click.option("--check", is_flag=True, help="ask the registry what is published, and pin it")
@registry_url
@click.option("--jobs", default=8, show_default=True, type=COUNT, help="of --check: connections")
@click.option("--pythons", help="folder of CPython prefixes (3.9, 3.9.18, …); default: fetched")
@click.option("--ca", help="file of extra certificates, a build secret")
@click.option("--keep-free-gb", default=10.0, show_default=True, help="stop when less is free")
@click.option("--logs", default="runs/images", show_default=True, type=FOLDER)
@as_json
def images(source: str, as_json: bool, **given: Any) -> None:
    """Build the environment images of SOURCE: nano, verified, swegym, or any source of rows. What
    is there is not built again; one that fails stops no other, and the exit code is 1. --check: the
    digests are written into the tasks of a folder, and the exit code is 1 where one is missing."""
    from nanoswe_harbor.convert import render
    from nanoswe_harbor.images import build, merged, plan

    if given["check"]:
        from nanoswe_harbor.registry import digests, pin, published

        # of connections that an error cuts before they begin
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        names = published(source)
        found = asyncio.run(digests(names.values(), given["registry"], given["jobs"]))
        if Path(source).is_dir():
            pin(Path(source), found)
        lines = [f"{row}: missing: {name}" for row, name in names.items() if not found[name]]
        text = "\n".join([*lines, f"{len(names) - len(lines)} of {len(names)} images are there"])
        click.echo(json.dumps(found) if as_json else text)
        sys.exit(bool(lines))
    targets = plan(source, given["only"])
    generated = render("bake.json.j2", {**given, "targets": targets})
    if given["prints"]:
        click.echo(merged(generated))
        return
    results = []
    with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
        job = bar.add_task("images", total=len(targets))
        for result in build(targets, generated, given["logs"], given["keep_free_gb"]):
            results.append(result)
            bar.update(job, advance=1, description=result["target"])
    text = render("builds.txt.j2", {"results": results})
    click.echo(json.dumps(results) if as_json else text)
    sys.exit(any(result["why"] for result in results))


@cli.group()
def image() -> None:
    """Look after built and unpacked images."""


@image.command("unpack")
@click.argument("source")
@click.option("--store", default="runs/images/store", show_default=True, type=FOLDER)
@registry_url
@click.option("--max-gb", default=40.0, show_default=True, help="refuse an image that is larger")
def unpack(source: str, **given: Any) -> None:
    """Make a folder of SOURCE, an image's name in a registry or an archive (docker save, OCI): no
    Docker, no root. The sandbox `bwrap` runs tasks in it (`sandbox.images`)."""
    from nanoswe_harbor.unpack import unpack as unpack_image

    click.echo(unpack_image(source, **given))


@image.command("prune")
@click.argument("datasets", nargs=-1, required=True, type=FOLDER)
@click.option("--yes", is_flag=True, help="remove them; without it they are only listed")
def prune(datasets: tuple[Path, ...], yes: bool) -> None:
    """Remove images of environments and tasks that no task of DATASETS names."""
    from nanoswe_harbor.task import load_tasks

    tasks = [task for dataset in datasets for task in load_tasks(dataset)]
    named = {task.docker_image.partition("@")[0] for task in tasks}
    named |= {f"nanoswe/task:{task.task_id.lower()}" for task in tasks}
    _print_rows("prune", *["--yes"] * yes, stdin="\n".join(sorted(named)))


def _print_rows(*argv: str, stdin: str = "") -> None:
    from nanoswe_harbor.images import script

    for row in script(*argv, stdin=stdin):
        click.echo("  ".join(row))


for verb, told in {
    "ls": "What is built here: id, size, age, name.",
    "size": "Layers and bytes by what they hold, each layer once.",
}.items():
    image.command(verb, help=told)(functools.partial(_print_rows, verb))


def _print_verdicts(verdicts: Iterable[dict[str, Any]], as_json: bool) -> None:
    """A line each as they come; exit code 0 when all are resolved."""
    total = resolved = 0
    for verdict in verdicts:
        total, resolved = total + 1, resolved + verdict["resolved"]
        reason = f" ({verdict['reason']})" if verdict["reason"] else ""
        line = f"{verdict['instance_id']}: {verdict['outcome']}{reason}"
        click.echo(json.dumps(verdict) if as_json else line)
    click.echo(f"{resolved} of {total} resolved", err=True)
    sys.exit(0 if resolved == total else 1)


def main() -> None:
    """Run the command line; the one place where errors become exit codes."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except (HarborError, OSError) as error:
        message, code = str(error), 2
    except click.ClickException as error:
        message, code = error.format_message(), 2
    except (click.Abort, KeyboardInterrupt):
        message, code = "interrupted", 130
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)
