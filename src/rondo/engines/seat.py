"""One engine's place in the pool: its state, and the calls that end when it leaves.

    JOINING --fed--> READY --drain--> DRAINING --> (removed)
       ^               |                 |
       +---- LOST <----+-----------------+    (died, hung, came back as another process, refused its weights)

Only READY takes requests. JOINING and READY take part in a publication.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from rondo.engines.protocol import Engine, EngineState
from rondo.errors import UnreachableError
from rondo.observe.lane import Lane
from rondo.types import Confirmation

RATE_SECONDS = 30.0

T = TypeVar("T")


class Status(Enum):
    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


class LostError(UnreachableError):
    """The engine left the pool while it was asked: no fault of what was asked."""


@dataclass(kw_only=True, eq=False)
class Seat:
    engine: Engine
    state: EngineState
    name: str = ""  # that of the process which the launcher started; empty: known by its address alone
    status: Status = Status.READY
    since: float = field(default_factory=time.monotonic)  # in this status
    reason: str = ""  # why it was lost
    gone: bool = False  # lost, and nobody will bring it back
    lane: Lane = field(default_factory=Lane)
    in_flight: int = 0  # samples
    retries: int = 0  # requests that failed here
    losses: int = 0  # how often it was lost
    tokens: int = 0  # answered here
    answered: deque[tuple[float, int]] = field(default_factory=deque)  # of late: when, and how many tokens
    calls: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def free(self) -> int:
        return self.state.slots - self.in_flight

    @property
    def label(self) -> str:
        """For people: the process's name and its address."""
        return f"{self.name} ({self.engine.url})" if self.name else f"engine {self.engine.url}"

    def answers(self, tokens: int) -> None:
        self.tokens += tokens
        self.answered.append((time.monotonic(), tokens))
        self._forget()

    def rate(self) -> float:
        """Tokens per second of the last half minute."""
        self._forget()
        return sum(tokens for _, tokens in self.answered) / RATE_SECONDS

    def _forget(self) -> None:
        while self.answered and self.answered[0][0] < time.monotonic() - RATE_SECONDS:
            self.answered.popleft()

    def become(self, status: Status, reason: str = "") -> None:
        self.status, self.reason, self.since = status, reason, time.monotonic()

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it returns; LostError at once when the engine leaves the pool meanwhile."""
        if self.status is Status.LOST:
            coroutine.close()
            raise LostError(f"{self.label} left the pool: {self.reason}")
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # heard, if only by us
        self.calls.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self.calls.discard(task)
            task.cancel()
        if task.cancelled():
            raise LostError(f"{self.label} left the pool: {self.reason}")
        return task.result()

    def let_go(self) -> None:
        """End every call under way."""
        for call in list(self.calls):
            call.cancel()


class Member:
    """An engine as a publication sees it: every call ends when the engine leaves the pool."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.url = seat.engine.url

    async def pause(self) -> None:
        await self.seat.call(self.seat.engine.pause())

    async def start_update(self) -> None:
        await self.seat.call(self.seat.engine.start_update())

    async def update(self, info: Mapping[str, Any]) -> None:
        await self.seat.call(self.seat.engine.update(info))

    async def finish_update(self) -> Confirmation:
        return await self.seat.call(self.seat.engine.finish_update())

    async def reset_prefix_cache(self) -> None:
        await self.seat.call(self.seat.engine.reset_prefix_cache())

    async def resume(self) -> None:
        await self.seat.call(self.seat.engine.resume())

    async def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        return await self.seat.call(self.seat.engine.prompt_logps(token_ids))

    async def health(self) -> None:
        await self.seat.call(self.seat.engine.health())
