"""The verbs `verify` and `replay` as a person types them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rondo.config import read_config
from rondo.errors import ConfigError
from rondo.verify.verify import MODES, record, verify_run

PERIODS = 3  # of a config that is trained for the purpose


def verify(
    target: Path,
    *,
    periods: int | None,
    first: int | None,
    modes: str,
    trials: int,
    ranks: str,
    overrides: Sequence[str],
    run_dir: Path | None,
) -> bool:
    console = Console(width=None if sys.stdout.isatty() else 120)
    counts = _counts(ranks)
    if target.is_dir():
        if overrides or modes:
            raise ConfigError(
                f"{target} is a recorded run: --set and --mode are for a config that is still to be trained"
            )
        certificate = verify_run(
            target.absolute(), periods=periods, first=first, trials=trials, ranks=counts, say=console.print
        )
        certificate.show(console)
        return certificate.holds
    config = read_config(target, overrides)
    base = (run_dir or Path("runs") / f"verify-{config.run.name}").absolute()
    verdicts = []
    for mode in _modes(modes):
        settings = [*overrides, *MODES.get(mode, ())]
        folder = record(target, settings, base / mode if mode else base, periods=periods or PERIODS)
        certificate = verify_run(folder, trials=trials, ranks=counts, say=console.print)
        certificate.show(console)
        verdicts.append(certificate.holds)
    return all(verdicts)


def _modes(words: str) -> list[str]:
    chosen = list(MODES) if words == "all" else words.split(",")
    if unknown := [word for word in chosen if word and word not in MODES]:
        raise ConfigError(f"--mode {unknown[0]} is unknown: choose from {', '.join(MODES)}, or all")
    return chosen


def _counts(words: str) -> tuple[int, ...]:
    if not all(word.strip().isdigit() and int(word) for word in words.split(",")):
        raise ConfigError(f"--ranks {words}: write numbers with commas, as in --ranks 1,2")
    return tuple(int(word) for word in words.split(","))
