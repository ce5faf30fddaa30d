"""Where a lane's time went. A lane is always in exactly one state, so its seconds add up to the wall clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SAME_CLOCK = 0.05  # seconds: monotonic clocks of two machines are never this close, those of two processes always are
LONGEST = 100_000  # stretches and marks that a lane holds between two cuts; more are counted, not kept


Stretch = tuple[str, float, float, tuple[Any, ...]]  # state, from, to, what it was about


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What a lane did since it was last cut."""

    start: float
    end: float
    stretches: list[Stretch]  # without gaps
    marks: list[Stretch]  # of things that went on during a state
    seconds: dict[str, float]  # per state, whole even where stretches were dropped
    dropped: int


class Lane:
    """One worker's clock: `switch` says what it does from now on. Any thread may switch it, mark it or cut it."""

    def __init__(self, state: str = "idle", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = state
        self._detail: tuple[Any, ...] = ()
        self._since = self._begun = clock()
        self._clear()

    @property
    def state(self) -> str:
        return self._state

    def switch(self, state: str, *detail: Any) -> None:
        with self._lock:
            if (state, detail) == (self._state, self._detail) and not detail:
                return
            self._end_stretch(self._clock())
            self._state, self._detail = state, detail

    @contextmanager
    def doing(self, state: str, *detail: Any) -> Iterator[None]:
        before = self._state, self._detail
        self.switch(state, *detail)
        try:
            yield
        finally:
            self.switch(before[0], *before[1])

    def mark(self, kind: str, start: float, end: float, *detail: Any) -> None:
        """Something that went on during a state: no state of its own."""
        with self._lock:
            if len(self._marks) < LONGEST:
                self._marks.append((kind, start, end, detail))
            else:
                self._dropped += 1

    def cut(self, now: float | None = None) -> Cut:
        """All since the last cut; lanes that are cut at the same `now` cover the same time."""
        with self._lock:
            now = self._clock() if now is None else max(now, self._since)
            self._end_stretch(now)
            cut = Cut(
                start=self._begun,
                end=now,
                stretches=self._stretches,
                marks=self._marks,
                seconds=self._seconds,
                dropped=self._dropped,
            )
            self._begun = now
            self._clear()
        return cut

    def peek(self) -> dict[str, float]:
        """Seconds per state since the last cut, up to now; nothing changes."""
        with self._lock:
            running = self._clock() - self._since
            return {**self._seconds, self._state: self._seconds.get(self._state, 0.0) + running}

    def take(self) -> dict[str, float]:
        """Seconds per state since the last `take` or `cut`."""
        return self.cut().seconds

    def _clear(self) -> None:
        self._stretches: list[Stretch] = []
        self._marks: list[Stretch] = []
        self._seconds: dict[str, float] = {}
        self._dropped = 0

    def _end_stretch(self, now: float) -> None:
        if now > self._since:
            self._seconds[self._state] = self._seconds.get(self._state, 0.0) + now - self._since
            if len(self._stretches) < LONGEST:
                self._stretches.append((self._state, self._since, now, self._detail))
            else:
                self._dropped += 1
        self._since = now


def on_our_clock(stretches: Sequence[Stretch], *, theirs: float, ours: float) -> list[Stretch]:
    """Another process's stretches, given one moment as both clocks show it."""
    offset = ours - theirs
    if abs(offset) < SAME_CLOCK:
        offset = 0.0  # what is left is how long the moment took to arrive
    return [(state, since + offset, until + offset, tuple(detail)) for state, since, until, detail in stretches]


def since(start: float, stretches: Sequence[Stretch]) -> Cut:
    """Stretches of another process as a cut, without what came before `start`."""
    kept = [(state, max(start, begun), until, detail) for state, begun, until, detail in stretches if until > start]
    end = kept[-1][2] if kept else start
    return Cut(start=start, end=end, stretches=kept, marks=[], seconds={}, dropped=0)
