"""The queue between producer and loader: a small state machine.

    OPEN --fail(error)--> FAILED     the producer ended early; every waiter raises its error
    OPEN --close()------> CLOSED     the run is over; every waiter raises Interrupted

The producer's thread puts, the trainer's thread gets; `fail` and `close` wake everyone and are final.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import Enum

from rondo.errors import Interrupted
from rondo.types import Group, Shortfall


class State(Enum):
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class GroupQueue:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: deque[Group | Shortfall] = deque()
        self._state = State.OPEN
        self._error: BaseException | None = None

    def put(self, group: Group | Shortfall) -> None:
        with self._changed:
            if self._state is State.OPEN:  # after the end nobody will train it
                self._groups.append(group)
                self._changed.notify_all()

    def get(self, seconds: float) -> Group | Shortfall | None:
        """The oldest group; waits for one up to `seconds`, then None."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                self.raise_if_over()
                if self._groups:
                    return self._groups.popleft()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(remaining)

    def fail(self, error: BaseException) -> None:
        self._end(State.FAILED, error)

    def close(self) -> None:
        self._end(State.CLOSED, Interrupted("the run was asked to stop"))

    def _end(self, state: State, error: BaseException) -> None:
        with self._changed:
            if self._state is State.OPEN:  # the first reason is the true one
                self._state, self._error = state, error
                self._changed.notify_all()

    def raise_if_over(self) -> None:
        """For those who wait for something else in the meantime."""
        if self._error is not None:
            raise self._error
