"""`rondo verify`: trains a run's recorded groups again, synchronously and otherwise, and judges what differs.

What each mode promises is decided here, in `promise`; what was found is measured by replay groups (`group.py`).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rondo.config import Config, read_config
from rondo.errors import ConfigError
from rondo.rollout.journal import read_period
from rondo.verify.account import all_violations
from rondo.verify.certificate import Certificate, judge
from rondo.verify.group import follower, run_group
from rondo.verify.plan import Plan
from rondo.verify.start import find_start, one_header

MODES = {
    "arrival": ("schedule.order=arrival", "trainer.accumulation=fast"),
    "prompt": ("schedule.order=prompt", "trainer.accumulation=fast"),
    "exact": ("schedule.order=arrival", "trainer.accumulation=exact", "trainer.shard=0"),
}


def record(file: Path, overrides: Sequence[str], folder: Path, *, periods: int) -> Path:
    """A run of `periods` periods, through the real launcher and engines, for the sake of its journal."""
    from rondo.launch.local import launch

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
) -> Certificate:
    """Everything that is checked about a recorded run; `certificate.json` is left in its folder."""
    began = time.monotonic()
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds no run: give the folder of one, or a TOML config to train")
    config = read_config(folder / "config.json")
    start = find_start(folder, first=first, count=periods)
    recorded = [read_period(folder, period) for period in start.wanted]
    header = one_header(folder, start.chain)
    scratch = Path(tempfile.mkdtemp(prefix=".verify-", dir=folder))
    plan = Plan(
        run=str(folder),
        scratch=str(scratch),
        start=start.path,
        steps=start.steps,
        chain=start.chain,
        checked=start.wanted,
        threads=header["threads"],
        leading=True,
        leading_ranks=header["ranks"],
        trials=trials,
        packings=tuple(packings or _packings(config)),
        truth=header["ranks"] == 1,
        synchronous_chain=True,
    )
    try:
        results = run_group(plan, config, ranks=plan.leading_ranks)
        for count in sorted({1, *ranks} - {plan.leading_ranks}):
            results.merge(run_group(follower(plan, truth=count == 1), config, ranks=count))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
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
