"""Another process's clock in terms of ours. On one host both are one; it is measured all the same."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

ASKED = 5  # times, of which the quickest answer counts
FRESH_SECONDS = 60.0  # clocks of two machines drift by tens of microseconds in a second


class Offset:
    """What to add to the other's time. Its error is at most half of the quickest round trip."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._measured_at = -FRESH_SECONDS
        self.seconds = 0.0
        self.error = 0.0

    @property
    def stale(self) -> bool:
        return self._clock() - self._measured_at >= FRESH_SECONDS

    async def measure(self, ask: Callable[[], Awaitable[float]]) -> None:
        """`ask` brings the other's time, read somewhere between the call and its return."""
        best = float("inf")
        for _ in range(ASKED):
            before = self._clock()
            theirs = await ask()
            after = self._clock()
            if after - before < best:
                best = after - before
                self.seconds, self.error = (before + after) / 2 - theirs, best / 2
        self._measured_at = self._clock()

    def ours(self, theirs: float) -> float:
        return theirs + self.seconds
