"""The command line: `serve` the proxy over HTTP, `replay` a session's log, `export` sealed
trajectories as samples.

Exit codes: 0 fine, 2 could not run (one line on stderr says why).
"""

import asyncio
import gc
import json
import os
import signal
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from nanoswe_proxy.errors import ProxyError

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
option = partial(click.option, show_default=True)


@click.group()
@click.version_option(version("nanoswe-proxy"))
def cli() -> None:
    """Chat in, tokens out, every token remembered."""


@cli.command()
@click.option("--engine", help="http://HOST:PORT, scripted:FILE, or MODULE:CLASS.")
@click.option("--tokenizer", type=FOLDER, help="Model folder: its template, too.")
@click.option("--provider", help="Instead of both: https://HOST/v1, for evaluation alone.")
@option("--host", default="127.0.0.1")
@option("--port", default=8080, type=click.IntRange(0, 65535), help="0 picks a free one.")
@option("--health-port", default=0, type=click.IntRange(0, 65535), help="From a thread of its own.")
@option("--temperature", default=1.0, type=click.FloatRange(0, 1000))
@option("--max-tokens", default=512, type=click.IntRange(1))
@option("--max-sessions", default=10_000, type=click.IntRange(1), help="More are refused.")
@option("--max-calls", default=1024, type=click.IntRange(1), help="More wait for their turn.")
@click.option("--trajectories", type=FILE, help="Append every sealed one to this JSONL file.")
@click.option("--logs", type=FOLDER, help="Log sessions here: they go on after a crash.")
@option("--workers", default=1, type=click.IntRange(1, 64), help="Processes, with ports of theirs.")
@click.option("--worker", default="", hidden=True)
def serve(
    engine: str, tokenizer: Path | None, provider: str, host: str, port: int, health_port: int,
    trajectories: Path | None, logs: Path | None, workers: int, worker: str, **limits: Any,
) -> None:  # fmt: skip
    """Serve until interrupted. NANOSWE_ADMIN_KEY, if set, guards the trainer's routes."""
    import uvloop

    from nanoswe_proxy import app as shell
    from nanoswe_proxy.trajectory import write_jsonl

    if bool(provider) == bool(engine) or bool(engine) != bool(tokenizer):
        raise click.UsageError("give --engine and --tokenizer, or --provider alone")
    if workers > 1 and not worker:
        uvloop.run(_front(workers, host, port, health_port))
        return
    number, _, fd = worker.partition(":")
    logs = logs / f"w{number}" if logs and worker else logs

    async def run() -> None:
        proxy, facts = await _proxy(engine, tokenizer, provider, logs, limits)
        stop = _stopped()
        if worker:  # its input ends with its parent
            proxy.prefix = f"w{number}-"
            asyncio.get_running_loop().add_reader(0, stop.set)
        if trajectories:
            write_jsonl(trajectories)  # what cannot be written is said now
            proxy.on_seal = partial(write_jsonl, trajectories)
        app = shell.create_app(proxy, admin_key=os.environ.get("NANOSWE_ADMIN_KEY", ""))
        async with shell.serve(proxy, host, port, app=app, fd=int(fd or -1)) as url:
            if not worker:
                click.echo(f"listening on {url}", err=True)
                facts.update(health=shell.watch(proxy, host, health_port) + "/health")
            if number in ("", "0"):
                click.echo(f"engine: {json.dumps(facts)}", err=True)
            await stop.wait()

    sys.setswitchinterval(0.001)  # encoders give way to the loop
    gc.freeze()  # what was imported lives as long as the process: no need to look at it again
    uvloop.run(run())


async def _proxy(
    engine: str, tokenizer: Path | None, provider: str, logs: Path | None, limits: dict
) -> tuple[Any, dict]:
    """A proxy, and what is known of what answers."""
    from nanoswe_proxy.engine import load_engine
    from nanoswe_proxy.engine.probe import probe
    from nanoswe_proxy.engine.provider import Provider
    from nanoswe_proxy.proxy import Proxy
    from nanoswe_proxy.render.base import Renderer

    renderer: Any = Renderer(tokenizer) if tokenizer else None
    asked: Any = load_engine(engine, tokenizer) if tokenizer else Provider(provider)
    proxy = Proxy(asked, renderer, logs, **limits)
    facts = await probe(asked, renderer) if tokenizer else {"provider": provider}
    if logs:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        (logs / "engine.json").write_text(json.dumps(facts) + "\n")
    return proxy, facts


def _stopped() -> asyncio.Event:
    """Set when the process is told to stop."""
    stop = asyncio.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    return stop


async def _front(count: int, host: str, port: int, health_port: int) -> None:
    from nanoswe_proxy.app import serve
    from nanoswe_proxy.workers import running

    stop = asyncio.ensure_future(_stopped().wait())
    async with running(count, host, port) as (front, watching):
        app = front.app()
        main, other = (serve(front, host, at, app=app) for at in (port, health_port))
        async with main as url, other as health:
            known = {"workers": front.urls, "health": f"{health}/health"}
            click.echo(f"listening on {url}\nworkers: {json.dumps(known)}", err=True)
            await asyncio.wait({stop, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # a worker that cannot start again


@cli.command()
@click.argument("log", type=click.Path(path_type=Path, dir_okay=False, exists=True))
def replay(log: Path) -> None:
    """The trajectory that a session's LOG describes, as far as it goes. Code 1: incomplete."""
    from nanoswe_proxy import export, state
    from nanoswe_proxy.log import read

    found = read(log)
    trajectory = export.trajectory(state.replay(found.records))
    click.echo(trajectory.to_json())
    if found.torn or trajectory.incomplete:
        click.echo(f"{log}: incomplete: {', '.join(trajectory.incomplete) or 'torn'}", err=True)
        sys.exit(1)


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--json", "as_json", is_flag=True, help="One line of JSON per sample.")
@click.option("--parquet", type=FILE, help="Write them here as columns; needs the extra `parquet`.")
def export(file: Path, as_json: bool, parquet: Path | None) -> None:
    """The samples in FILE (trajectories as JSONL): a table, with --json or --parquet the rows."""
    from nanoswe_proxy.trajectory import read_jsonl

    whole = list(read_jsonl(file))
    if foreign := [t.trial_id for t in whole if t.calls]:
        told = f"{file}: {foreign[0]} was answered by a provider: no token ids, nothing can train"
        raise click.ClickException(told)
    rows = (
        {"trial_id": trajectory.trial_id, "try": trajectory.try_, "sample": i, **row}
        for trajectory in whole
        for i, row in enumerate(json.loads(trajectory.to_json())["samples"])
    )
    if parquet:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise click.ClickException("it needs pip install 'nanoswe-proxy[parquet]'") from error
        columns = [row | {"stops": json.dumps(row["stops"])} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), parquet)
        return
    line = "{:24} {:>3} {:>6} {:>8} {:>8} {:>5}  {}".format
    if not as_json:
        click.echo(line("trial", "try", "sample", "tokens", "trained", "turns", "stops"))
    for row in rows:
        facts = (len(row["tokens"]), row["provenance"].count("s"), len(row["stops"]))
        table = line(*list(row.values())[:3], *facts, " ".join(row["stops"].values()))
        click.echo(json.dumps(row, allow_nan=False) if as_json else table)


def main() -> None:
    """Entry point."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except (click.ClickException, ProxyError, OSError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else error
        click.echo(f"nanoswe-proxy: {message}", err=True)
        sys.exit(2)
