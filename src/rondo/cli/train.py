"""`rondo train` and `rondo demo`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import ConfigFile, RunDir, Set, app


@app.command()
def train(
    file: ConfigFile,
    set_: Set = None,
    run_dir: RunDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and check model, data and rewards.")
    ] = False,
) -> None:
    """Train a model; under torchrun (`torchrun ... -m rondo train FILE`), as one of its ranks."""
    from rondo.config import read_config

    overrides = list(set_ or [])
    if run_dir is not None:
        overrides.append(f"run.folder='{run_dir}'")
    config = read_config(file, overrides)
    if dry_run:
        from rondo.launch.preflight import check, check_prompts

        typer.echo(config.model_dump_json(indent=2))
        check(config)
        check_prompts(config)
        typer.echo("model, data and rewards were found")
        return
    from rondo.launch import torchrun

    if torchrun.started_us():
        raise typer.Exit(torchrun.main(config, resume=resume))
    from rondo.launch.start import launch

    launch(config, resume=resume)


@app.command()
def demo(
    set_: Set = None,
    run_dir: Annotated[Path, typer.Option(help="The run's folder; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train the small model that ships with Rondo on arithmetic, in about three minutes on two cores."""
    from rondo.config import ASSETS, read_config
    from rondo.launch.start import launch

    config = read_config(ASSETS / "arithmetic" / "demo.toml", [*(set_ or []), f"run.folder='{run_dir}'"])
    launch(config, overwrite=True)
    typer.echo("")
    typer.echo("Try next, to see what the overlap brings: the same run, training only when all is generated:")
    rondo = "rondo" if shutil.which("rondo") else os.path.relpath(sys.argv[0])
    beside = run_dir.with_name(run_dir.name + "-synchronous")
    typer.echo(f"  {rondo} demo --set schedule.mode=synchronous --run-dir {beside}")
    typer.echo("and both side by side, on one page:")
    typer.echo(f"  {rondo} report {run_dir} --against {beside}")
