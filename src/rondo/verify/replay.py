"""`rondo replay`: one recorded period, trained again without engines; with other settings, from the same weights."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rondo.config import read_config
from rondo.verify.group import follower, run_group
from rondo.verify.plan import Check, Results
from rondo.verify.start import opened

WORST = 5  # tensors that are shown


def replay_period(folder: Path, period: int, overrides: Sequence[str]) -> tuple[Results, Results | None]:
    """As it was recorded, and under other settings where there are any."""
    with opened(folder, first=period, count=1) as (config, recorded):
        plan = dataclasses.replace(recorded, as_recorded=True)
        found = run_group(plan, config, ranks=plan.leading_ranks)
        if not overrides:
            return found, None
        changed = read_config(folder / "config.json", overrides)
        other = follower(plan, truth=False)
        if changed.trainer.threads:
            other = dataclasses.replace(other, threads=changed.trainer.threads)
        ranks = changed.trainer.ranks if changed.trainer.ranks != config.trainer.ranks else plan.leading_ranks
        return found, run_group(other, changed, ranks=ranks)


def replay(folder: Path, period: int, overrides: Sequence[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    found, other = replay_period(folder.absolute(), period, overrides)
    for step in found.reproduced:
        if step.period != period:
            continue
        assert step.found is not None
        verdict = "[green]as recorded[/]" if step.same else "[red]recorded otherwise[/]"
        if step.recorded is None:
            verdict = "no hashes recorded"
        console.print(
            f"period {period}, update {step.update}: gradient norm {step.found['norm']:.6g}, gradient "
            f"{step.found['gradient']}, weights {step.found['weights']}: {verdict}"
        )
        if step.recorded and not step.same:
            console.print(f"  recorded: gradient {step.recorded['gradient']}, weights {step.recorded['weights']}")
        console.print(f"  {_timing(step.seconds)}")
    for check in other.checks if other else ():
        console.print(f"with {' '.join(overrides)}, update {check.update}: {_timing(check.seconds)}")
        console.print(_table(check))


def _timing(seconds: Sequence[float]) -> str:
    if not seconds:
        return "no micro-step: no group had a gradient"
    middle, longest = statistics.median(seconds), max(seconds)
    return (
        f"{len(seconds)} micro-steps in {sum(seconds):.3f} s: median {1000 * middle:.1f} ms, "
        f"longest {1000 * longest:.1f} ms"
    )


def _table(check: Check) -> Table:
    differing = sum(tensor.differing > 0 for tensor in check.tensors)
    table = Table(
        title=f"gradient against the recorded one: {differing} of {len(check.tensors)} tensors differ, worst first",
        title_justify="left",
    )
    for column in ("tensor", "bits differ", "max ulp", "|v-g|/|g|"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for tensor in sorted(check.tensors, key=lambda tensor: -tensor.relative)[:WORST]:
        table.add_row(
            tensor.name, f"{tensor.differing:,} of {tensor.elements:,}", f"{tensor.ulps:,}", f"{tensor.relative:.1e}"
        )
    return table
