"""`rondo verify`: trains a run's recorded groups again, synchronously and otherwise, and judges what differs.

What each mode promises is decided here, in `promise`; what was found is measured by replay groups (`group.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rondo.config import Config, read_config
from rondo.rollout.journal import read_period
from rondo.verify.account import all_violations
from rondo.verify.certificate import Certificate, judge
from rondo.verify.group import follower, run_group
from rondo.verify.start import opened

MODES = {
    "arrival": ("schedule.order=arrival", "trainer.accumulation=fast"),
    "prompt": ("schedule.order=prompt", "trainer.accumulation=fast"),
    "exact": ("schedule.order=arrival", "trainer.accumulation=exact", "trainer.shard=0"),
}


def record(file: Path, overrides: Sequence[str], folder: Path, *, periods: int) -> Path:
    """A run of `periods` periods, through the real launcher and engines, for the sake of its journal."""
    from rondo.launch.start import launch

    settings = [
        *overrides, f"run.folder='{folder}'", f"schedule.periods={periods}", "data.eval=''",
        "journal.enabled=true", "journal.hashes=true", "journal.keep=0",
    ]  # fmt: skip
    return launch(read_config(file, settings), overwrite=True)


def verify_run(
    folder: Path,
    *,
    periods: int | None = None,
    first: int | None = None,
    trials: int = 1,
    ranks: Sequence[int] = (1, 2),
    packings: Sequence[int] = (),
    say: Callable[[str], None] = lambda sentence: None,
) -> Certificate:
    """Everything that is checked about a recorded run; `certificate.json` is left in its folder."""
    began = time.monotonic()
    with opened(folder, first=first, count=periods) as (config, recorded_plan):
        own = recorded_plan.leading_ranks
        plan = dataclasses.replace(
            recorded_plan,
            trials=trials,
            packings=tuple(packings or _packings(config)),
            truth=own == 1,
            synchronous_chain=True,
        )
        recorded = [read_period(folder, period) for period in plan.checked]
        groups = sum(len(period.groups) for period in recorded)
        say(
            f"training the {groups} recorded groups again on {own} rank(s): as recorded, synchronously, shuffled, in "
            "other packs ..."
        )
        results = run_group(plan, config, ranks=own)
        for count in sorted({1, *ranks} - {own}):
            say(f"and on {count} rank(s) ...")
            results.merge(run_group(follower(plan, truth=count == 1), config, ranks=count))
    certificate = judge(
        folder=folder,
        config=config,
        periods=recorded,
        violations=all_violations(config, recorded),
        results=results,
        seconds=time.monotonic() - began,
    )
    certificate.write(folder / "certificate.json")
    return certificate


def _packings(config: Config) -> tuple[int, ...]:
    return (max(1, config.trainer.micro_tokens // 2),)
