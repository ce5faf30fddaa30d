"""Where a replay can start: the base model, or the nearest checkpoint before the period asked for."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.config import Config, read_config
from rondo.errors import ConfigError, JournalError
from rondo.rollout.journal import ALIKE, read_period, recorded_periods
from rondo.verify.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Start:
    path: str  # of a checkpoint; empty: the base model
    steps: int  # taken before it
    chain: tuple[int, ...]  # periods to train from there, the ones asked for last
    wanted: tuple[int, ...]


@contextmanager
def opened(folder: Path, *, first: int | None, count: int | None) -> Iterator[tuple[Config, Plan]]:
    """A recorded run's config, and the plan to train these periods again as it did, with a scratch folder that goes."""
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds no run: give the folder of one")
    config = read_config(folder / "config.json")
    start = find_start(folder, first=first, count=count)
    header = one_header(folder, start.chain)
    scratch = Path(tempfile.mkdtemp(prefix=".replay-", dir=folder))
    try:
        yield (
            config,
            Plan(
                run=str(folder),
                scratch=str(scratch),
                start=start.path,
                steps=start.steps,
                chain=start.chain,
                checked=start.wanted,
                threads=header["threads"],
                leading=True,
                leading_ranks=header["ranks"],
            ),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find_start(folder: Path, *, first: int | None, count: int | None) -> Start:
    """For `count` periods from `first` on (None: all that are recorded, from the first that can be reached)."""
    held = set(recorded_periods(folder))
    starts = {0: ("", 0)}
    for path in sorted((folder / "checkpoints").glob("period-*")):
        progress = json.loads((path / "progress.json").read_text())
        starts[progress["period"]] = (str(path), progress["steps"])
    if first is None:
        first = next((period for period in sorted(starts) if period in held), -1)
    reachable = [period for period in starts if period <= first and held.issuperset(range(period, first + 1))]
    if not reachable:
        raise JournalError(
            f"{folder} cannot be trained again from period {first if first >= 0 else 0}: between it and the base model "
            "or a checkpoint before it, not every period is in the journal"
        )
    begin = max(reachable)
    wanted = []
    for period in range(first, max(held) + 1 if count is None else first + count):
        if period not in held or not read_period(folder, period).complete:
            break
        wanted.append(period)
    if not wanted or (count is not None and len(wanted) < count):
        raise JournalError(f"{folder} holds {len(wanted)} complete periods from period {first} on, not {count or 1}")
    chosen, steps = starts[begin]
    return Start(path=chosen, steps=steps, chain=tuple(range(begin, wanted[-1] + 1)), wanted=tuple(wanted))


def one_header(folder: Path, chain: tuple[int, ...]) -> Mapping[str, Any]:
    """How these periods were trained; they must have been trained alike, for one group of processes to repeat them."""
    headers = {period: read_period(folder, period).header for period in chain}
    first = headers[chain[0]]
    for period, header in headers.items():
        for key in ALIKE:
            if header[key] != first[key]:
                raise JournalError(
                    f"{folder}: period {chain[0]} was trained with {key} = {first[key]} and period {period} with "
                    f"{header[key]}: choose periods that were trained alike (--first, --periods)"
                )
    return first
