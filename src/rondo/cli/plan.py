"""`rondo plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import app
from rondo.errors import UserError


@app.command()
def plan(
    run: Annotated[Path, typer.Argument(help="A recorded run's folder.")],
    devices: Annotated[int, typer.Option(help="How many to share out between engines and trainer ranks.", min=2)],
    group_sizes: Annotated[str, typer.Option(help="To compare, with commas; default: half, the run's, twice.")] = "",
    prompts: Annotated[str, typer.Option(help="Per period, to compare, with commas; default: the same.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Simulate other splits of devices and other sizes, from what a recorded run measured; say what is best and why."""
    from rich.console import Console

    from rondo.plan import search, show
    from rondo.plan.calibrate import calibrate

    found = search.plan(
        calibrate(run),
        devices=devices,
        groups=_numbers("--group-sizes", group_sizes),
        prompts=_numbers("--prompts", prompts),
    )
    if as_json:
        typer.echo(json.dumps(show.as_json(found), indent=2))
    else:
        show.show(found, Console())


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"{option} {text}: give whole numbers above 0, with commas between them")
    return [int(word) for word in words]
