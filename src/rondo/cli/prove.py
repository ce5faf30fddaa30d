"""`rondo verify` and `rondo replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rondo.cli.app import RunDir, Set, app


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(help="A TOML config to train and then verify, or a recorded run's folder.")],
    periods: Annotated[int | None, typer.Option(help="How many; of a recorded run all, unless said.")] = None,
    first: Annotated[int | None, typer.Option(help="The first one, of a recorded run.")] = None,
    mode: Annotated[
        str, typer.Option(help="Of a config: arrival, prompt, exact, several with commas, or all; default: its own.")
    ] = "",
    order: Annotated[
        str, typer.Option(help="shuffled: also try arrival orders of chance; recorded: do not.")
    ] = "shuffled",
    trials: Annotated[int, typer.Option(help="How many shuffled orders.")] = 1,
    ranks: Annotated[str, typer.Option(help="Rank counts to try, besides the run's own.")] = "1,2",
    set_: Set = None,
    run_dir: RunDir = None,
) -> None:
    """Prove that periodic training gave the synchronous result. Exit code 1 where it did not."""
    from rondo.verify.command import verify as verify_target

    holds = verify_target(
        target,
        periods=periods,
        first=first,
        modes=mode,
        trials=trials if order == "shuffled" else 0,
        ranks=ranks,
        overrides=list(set_ or []),
        run_dir=run_dir,
    )
    raise typer.Exit(0 if holds else 1)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A recorded run's folder.")],
    period: Annotated[int, typer.Option(help="The period to train again.")],
    set_: Set = None,
) -> None:
    """Train a recorded period again, without engines; with --set, under other settings."""
    from rondo.verify.replay import replay as replay_period

    replay_period(run, period, list(set_ or []))
