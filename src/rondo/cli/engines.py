"""`rondo engines`, `rondo join` and `rondo leave`: the engines of a run that is going."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rondo.cli.app import app

Run = Annotated[str, typer.Argument(help="The run's folder, or its control address.", metavar="RUN")]
RunOption = Annotated[str, typer.Option("--run", help="The run's folder, or its control address.", metavar="RUN")]
Engine = Annotated[str, typer.Option(help="The engine's address: http://HOST:PORT.", metavar="URL")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the run's token; default: its folder, or RONDO_TOKEN.")]


@app.command()
def engines(run: Run, token_file: TokenFile = None) -> None:
    """List a run's engines: state, load, version and throughput."""
    from rondo.engines.guest import find_control

    listed = find_control(run, token_file).ask("/engines")["engines"]
    rows = [_row(one) for one in listed]
    heads = ("engine", "state", "load", "version", "tokens/s", "retries", "lost", "boot")
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    for row in [heads, *rows]:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    for one in listed:
        if one["reason"]:
            typer.echo(f"{one['url']}: {one['reason']}")


@app.command()
def join(
    engine: Engine,
    run: RunOption,
    token_file: TokenFile = None,
    engine_token_file: Annotated[
        Path | None, typer.Option(help="File with the engine's own token, if it is not the run's.")
    ] = None,
) -> None:
    """Let an engine that already runs join a run; it takes work when this returns."""
    from rondo.engines.bearer import read_token
    from rondo.engines.guest import JOIN_SECONDS, find_control

    body = {"url": engine}
    if engine_token_file is not None:
        body["token"] = read_token(engine_token_file)
    answer = find_control(run, token_file).ask("/join", body, seconds=JOIN_SECONDS)
    typer.echo(f"{answer['url']} joined with version {answer['version']} ({answer['slots']} slots)")


@app.command()
def leave(
    engine: Engine,
    run: RunOption,
    now: Annotated[bool, typer.Option("--now", help="Hand its requests to others instead of finishing them.")] = False,
    token_file: TokenFile = None,
) -> None:
    """Let an engine leave a run; nothing is asked of it any more when this returns."""
    from rondo.engines.guest import LEAVE_SECONDS, find_control

    find_control(run, token_file).ask("/leave", {"url": engine, "now": now}, seconds=LEAVE_SECONDS)
    typer.echo(f"{engine} left")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    name = f"{one['name']} {one['url']}" if one["name"] else one["url"]
    load = f"{one['in_flight']}/{one['slots']}"
    return (
        name,
        one["state"],
        load,
        str(one["version"]),
        f"{one['tokens_per_second']:.0f}",
        str(one["retries"]),
        str(one["losses"]),
        one["boot"][:8],
    )
