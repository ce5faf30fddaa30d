"""Commands that Rondo's own processes are started with; no person types them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import app


@app.command(hidden=True)
def rank(folder: Path, resume: Annotated[bool, typer.Option("--resume")] = False) -> None:
    """One trainer rank of the run in FOLDER; started by the launcher."""
    from rondo.config import read_config
    from rondo.launch import lifeline
    from rondo.weights.folder import publication_folder, remove_publication_folder

    config = read_config(folder / "config.json")
    published = publication_folder(config.weights.folder, folder)
    lifeline.hold(lambda: remove_publication_folder(published))
    from rondo.launch.rank import main as rank_main

    raise typer.Exit(rank_main(config, folder, resume=resume))


@app.command("replay-rank", hidden=True)
def replay_rank(folder: Path) -> None:
    """One rank that trains the plan in FOLDER; started by verify and replay."""
    from rondo.launch import lifeline

    lifeline.hold()
    from rondo.verify.worker import main as worker_main

    worker_main(folder)
