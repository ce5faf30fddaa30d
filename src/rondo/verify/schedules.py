"""The micro-batches of one period under a schedule. The synchronous and the shuffled ones come from the real loader.

A rehearsal stands where the queue would: groups arrive in a given order, in bursts of random size, without any waiting.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rondo.config import Config, changed
from rondo.errors import RondoError
from rondo.launch.build_loader import build_loader, whole_period
from rondo.observe.lane import Lane
from rondo.rollout.journal import RecordedPeriod
from rondo.stream.queue import GroupQueue
from rondo.types import Group, MicroBatch, Shortfall

Updates = list[list[MicroBatch]]  # per update, in order


class Rehearsal(GroupQueue):
    """Hands out arrivals: one when somebody waits, then as many as `burst` says to those who only look."""

    def __init__(self, arrivals: Sequence[Group | Shortfall], burst: Callable[[], int]) -> None:
        super().__init__()
        self._arrivals = list(reversed(arrivals))
        self._burst = burst
        self._at_hand = 0

    def get(self, seconds: float) -> Group | Shortfall | None:
        if seconds > 0:
            self._at_hand = self._burst()
        elif not self._at_hand:
            return None
        else:
            self._at_hand -= 1
        if not self._arrivals:
            if seconds > 0:
                raise RondoError(
                    "the loader waits for a group that the journal does not hold: the record is incomplete"
                )
            return None
        return self._arrivals.pop()


def recorded(config: Config, period: RecordedPeriod) -> Updates:
    """As the run trained it."""
    return period.rebuilt(whole_period(config))


def synchronous(config: Config, period: RecordedPeriod, ranks: int) -> Updates:
    """All groups there, in prompt order, before the first is trained."""
    arrivals = sorted(period.groups, key=lambda group: group.index)
    return _rehearse(changed(config, "schedule.mode", "synchronous"), period, arrivals, ranks, lambda: 0)


def shuffled(config: Config, period: RecordedPeriod, ranks: int, seed: int) -> Updates:
    """Trained while they arrive, in an order and in bursts of chance."""
    draw = random.Random(f"{seed} {period.period}")
    arrivals = draw.sample(period.groups, len(period.groups))
    longest = max(2, len(arrivals) // 8)
    return _rehearse(
        changed(config, "schedule.mode", "periodic"), period, arrivals, ranks, lambda: draw.randrange(longest)
    )


def _rehearse(
    config: Config, period: RecordedPeriod, arrivals: Sequence[Group], ranks: int, burst: Callable[[], int]
) -> Updates:
    wanted = config.rollout.prompts_per_period
    over = [Shortfall(period=period.period, groups=len(arrivals))] if len(arrivals) < wanted else []
    queue = Rehearsal([*arrivals, *over], burst)
    loader = build_loader(config, queue, Lane(), ranks)
    return [list(update) for update in loader.updates(period.period)]
