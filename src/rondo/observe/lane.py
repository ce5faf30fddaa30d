"""Where a lane's time went. A lane is always in exactly one state, so its seconds add up to the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Lane:
    """One worker's clock: `switch` says what it does from now on. Used from one thread at a time."""

    def __init__(self, state: str = "idle", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = state
        self._since = clock()
        self._seconds: dict[str, float] = {}

    @property
    def state(self) -> str:
        return self._state

    def switch(self, state: str) -> None:
        now = self._clock()
        self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
        self._state, self._since = state, now

    @contextmanager
    def doing(self, state: str) -> Iterator[None]:
        before = self._state
        self.switch(state)
        try:
            yield
        finally:
            self.switch(before)

    def take(self) -> dict[str, float]:
        """Seconds per state since the last `take`."""
        self.switch(self._state)
        seconds, self._seconds = self._seconds, {}
        return seconds
