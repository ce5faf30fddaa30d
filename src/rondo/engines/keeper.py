"""Keeps the pool's engines alive, fed and known: the pool's membership.

Everything runs in the loop of the engines' connections.
- `watch` looks at every engine that takes work, every few seconds: one that gives no sign of life twice, that refuses
  the connection, or behind whose address another process answers, is lost. It waits for nobody.
- for every lost engine one task (`_bring_back`) waits until its origin has something to try (a new process that the
  launcher announced; the same address, after a while), feeds it the last publication, probes it and lets it take work.
  A publication that starts meanwhile takes it along.
- `join` and `leave` are called by the control endpoint.

An engine whose origin says that it will not come back is given up. When all are, `on_over` ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rondo.engines.pool import EnginePool, Member, Seat, Status
from rondo.engines.protocol import Engine, EngineState
from rondo.errors import DiedError, EngineError, PublicationError, RondoError, UnreachableError
from rondo.types import Confirmation

MISSES = 2  # signs of life that fail to come, one after the other, before an engine is lost
AGAIN_SECONDS = 0.1  # between two looks at an engine that failed the first
FAILED_RETURNS = 5  # how often an engine may be reached and not take its weights, in a row


class GoneError(EngineError):
    """This engine will not come back."""


class Origin(Protocol):
    """Where a lost engine comes from again."""

    def lost(self, seat: Seat) -> None:
        """Told when it is lost."""

    def left(self, seat: Seat) -> None:
        """Told when it left for good."""

    async def again(self, seat: Seat, attempt: int) -> Engine:
        """Returns when there is something to try; raises GoneError when there never will be."""


class Feeder(Protocol):
    """What the publisher does for a newcomer."""

    @property
    def under_way(self) -> bool: ...

    async def feed(self, receiver: Any) -> Confirmation | None: ...


@dataclass(frozen=True, kw_only=True)
class KeeperSettings:
    every: float  # seconds between two looks at an engine
    deadline: float  # seconds in which it must give a sign of life


class Keeper:
    def __init__(
        self,
        *,
        pool: EnginePool,
        settings: KeeperSettings,
        origin: Callable[[Seat], Origin],
        check: Callable[[str, EngineState], None],
        say: Callable[[str], None],
        on_over: Callable[[RondoError], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._origin = origin
        self._check = check  # raises when a newcomer cannot serve this run
        self._say = say
        self._on_over = on_over
        self._sleep = sleep
        self._feeder: Feeder | None = None
        self._watching: asyncio.Task[Any] | None = None
        self._returning: dict[Seat, asyncio.Task[None]] = {}
        self._moving: set[Seat] = set()  # on their way in or out: nobody brings them back

    def begin(self, feeder: Feeder) -> None:
        """Engines that are lost from here on can be fed."""
        self._feeder = feeder

    async def watch(self) -> None:
        self._watching = asyncio.current_task()
        while True:
            await self._sleep(self._settings.every)
            await asyncio.gather(*(self._look(seat) for seat in list(self._pool.seats)))

    async def close(self) -> None:
        tasks = [*self._returning.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lost(self, seat: Seat) -> None:
        """The pool's word that an engine is lost."""
        if seat in self._moving:
            return
        moves = "; what it was asked goes to others" if seat.in_flight else ""
        waits = "" if self._pool.ready else "; no engine is left: the period waits until one is back"
        self._say(f"{seat.label} left the pool: {seat.reason}{moves}{waits}")
        self._origin(seat).lost(seat)
        if seat not in self._returning:
            task = asyncio.get_running_loop().create_task(self._bring_back(seat))
            self._returning[seat] = task
            task.add_done_callback(lambda task: self._returned(seat, task))

    async def join(self, engine: Engine) -> Seat:
        """A newcomer takes work when this returns; raises EngineError or PublicationError when it cannot."""
        if any(seat.engine.url == engine.url and seat.status is not Status.LOST for seat in self._pool.seats):
            raise EngineError(f"engine {engine.url} takes part already")
        state = await engine.state()
        self._check(engine.url, state)
        seat = next((seat for seat in self._pool.seats if seat.engine.url == engine.url), None)
        if seat is not None:  # it was here before, and is back sooner than it was looked for
            if (task := self._returning.pop(seat, None)) is not None:
                task.cancel()
            self._pool.readmit(seat, engine, state)
        else:
            seat = self._pool.admit(engine, state)
        self._moving.add(seat)
        try:
            await self._bring_in(seat)
        except (EngineError, PublicationError):
            self._pool.remove(seat)
            raise
        finally:
            self._moving.discard(seat)
        self._say(f"{seat.label} joined with version {seat.state.version}")
        return seat

    async def leave(self, seat: Seat, *, now: bool) -> None:
        """Out of the pool for good: its requests are finished first, or handed to others."""
        self._moving.add(seat)
        if (task := self._returning.pop(seat, None)) is not None:
            task.cancel()
        if not now:
            await self._pool.drain(seat)
        self._pool.remove(seat)
        self._moving.discard(seat)
        self._origin(seat).left(seat)
        waits = "" if self._pool.ready else "; no engine is left: the period waits until one joins"
        self._say(f"{seat.label} was asked to leave, and left{waits}")

    async def _look(self, seat: Seat) -> None:
        for missed in range(1, MISSES + 1):
            if seat.status is Status.LOST:
                return
            boot = seat.state.boot
            loading = seat.status is Status.JOINING or (self._feeder is not None and self._feeder.under_way)
            try:
                state = await asyncio.wait_for(self._sign(seat, deep=not loading), self._settings.deadline)
            except TimeoutError:
                reason = f"it gave no sign of life {missed} times within {self._settings.deadline:g} s"
                reason += " (engines.health_seconds)"
                continue
            except EngineError as error:
                reason = str(error)
                await self._sleep(AGAIN_SECONDS)
                continue
            if state is not None and state.boot != boot and seat.state.boot == boot:
                self._pool.lose(
                    seat, "another process answers at its address: it was restarted, and holds other weights"
                )
            return
        self._pool.lose(seat, reason)

    async def _sign(self, seat: Seat, *, deep: bool) -> EngineState | None:
        """`deep` asks its workers too; while they load weights they would answer late."""
        await seat.engine.health()
        return await seat.engine.state() if deep else None

    async def _bring_back(self, seat: Seat) -> None:
        attempt = failures = 0
        while seat.status is Status.LOST:
            engine = await self._origin(seat).again(seat, attempt)
            attempt += 1
            try:
                state = await asyncio.wait_for(engine.state(), self._settings.deadline)
            except (EngineError, TimeoutError):
                continue  # not yet; the origin knows how long to wait
            try:
                self._check(engine.url, state)
                self._pool.readmit(seat, engine, state)
                await self._bring_in(seat)
            except RondoError as error:
                failures += not isinstance(error, UnreachableError)
                if failures >= FAILED_RETURNS:
                    raise GoneError(f"it came back {failures} times and could not take part: {error}") from error
                self._pool.lose(seat, f"it came back and could not take part: {error}")
        self._say(f"{seat.label} is back, with version {seat.state.version}")

    async def _bring_in(self, seat: Seat) -> None:
        """From JOINING to READY: by a feed, or by a publication that came between."""
        assert self._feeder is not None
        while seat.status is Status.JOINING:
            confirmation = await self._feeder.feed(Member(seat))
            if confirmation is not None and not self._feeder.under_way:  # else that one takes it along
                self._pool.confirm(seat, confirmation)
        if seat.status is Status.LOST:
            raise UnreachableError(seat.reason)

    def _returned(self, seat: Seat, task: asyncio.Task[None]) -> None:
        if self._returning.get(seat) is task:
            del self._returning[seat]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, GoneError):
            self._on_over(error if isinstance(error, RondoError) else DiedError(f"the engines' keeper: {error!r}"))
            return
        seat.gone, seat.reason = True, str(error)
        self._say(f"{seat.label} is given up: {error}")
        if all(one.gone for one in self._pool.seats):
            reasons = "; ".join(f"{one.label}: {one.reason}" for one in self._pool.seats)
            self._on_over(DiedError(f"no engine is left that could come back: {reasons}"))
