"""Starts the processes of a replay group, as the launcher starts trainer ranks, and waits for their results."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

from rondo.config import Config, changed
from rondo.errors import DiedError, RondoError
from rondo.launch.cpu import environment_for
from rondo.launch.processes import Child, end_all, rank_environment
from rondo.verify.plan import Plan, Results

POLL_SECONDS = 0.02


def run_group(plan: Plan, config: Config, *, ranks: int) -> Results:
    """Trains by the plan on so many ranks; raises what stopped it."""
    scratch = Path(plan.scratch)
    config = changed(changed(config, "trainer.ranks", ranks), "journal.hashes", True)
    if not plan.leading:
        config = changed(config, "trainer.shard", 0)
    config.write(scratch / "config.json")
    plan.write(scratch / "plan.json")
    (scratch / "results.json").unlink(missing_ok=True)
    meeting = scratch / "rendezvous"
    meeting.unlink(missing_ok=True)
    environment = environment_for(config.model.dtype, config.trainer.dtype)
    children = [
        Child(
            f"replay-{rank}",
            ["replay-rank", str(scratch)],
            log=scratch / f"replay-{rank}.log",
            cpus=config.trainer.cpus[rank::ranks] or config.trainer.cpus,
            environment=environment | rank_environment(rank, ranks, meeting),
        )
        for rank in range(ranks)
    ]
    try:
        while any(child.exit_code is None for child in children):
            if any(child.exit_code for child in children):
                break
            time.sleep(POLL_SECONDS)
        for child in children:
            if child.exit_code:
                raise _why(child)
    finally:
        end_all(children)
    return Results.read(scratch / "results.json")


def follower(plan: Plan, *, truth: bool) -> Plan:
    """For a group with another number of ranks, after the leading one."""
    return dataclasses.replace(plan, leading=False, synchronous_chain=False, truth=truth)


def _why(child: Child) -> RondoError:
    kept = child.log.parent.parent / child.log.name  # the folder of the plan goes
    shutil.copy(child.log, kept)
    if sentence := child.last_error():
        return RondoError(sentence)
    return DiedError(child.obituary().replace(str(child.log), str(kept)))
