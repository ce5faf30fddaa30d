"""All engines of a run: who gets the next request, and what happens when one fails.

`generate` waits until an engine has room (woken by whichever request ends), in the order in which it was called. The
engine with the most free slots takes the next group. A little more than the slots is kept in flight, so that a freed
slot is refilled without a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rondo.engines.protocol import Engine, EngineState
from rondo.errors import EngineError, StaleRolloutError
from rondo.observe.lane import Lane
from rondo.types import Answer, Sampling


@dataclass(kw_only=True)
class Seat:
    """One engine's place in the pool."""

    engine: Engine
    state: EngineState
    lane: Lane = field(default_factory=Lane)
    in_flight: int = 0  # samples

    @property
    def free(self) -> int:
        return self.state.slots - self.in_flight


class EnginePool:
    def __init__(self, *, max_retries: int, on_retry: Callable[[EngineError], None]) -> None:
        self.seats: list[Seat] = []
        self.retries = 0
        self._max_retries = max_retries
        self._on_retry = on_retry
        self._queue: deque[tuple[int, asyncio.Future[Seat]]] = deque()

    async def add(self, engine: Engine) -> None:
        self.seats.append(Seat(engine=engine, state=await engine.state()))
        self._admit()

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling, version: int) -> Answer:
        """An answer of exactly this version; a failed request is sent again, with the same seed."""
        for attempt in range(self._max_retries + 1):
            seat = await self._seat(n)
            try:
                answer = await seat.engine.generate(prompt, n=n, seed=seed, sampling=sampling)
                _check_version(answer, version)
                return answer
            except EngineError as error:
                if attempt == self._max_retries:
                    raise
                self.retries += 1
                self._on_retry(error)
                await asyncio.sleep(min(5.0, 0.1 * 2**attempt))
            finally:
                self._leave(seat, n)
        raise AssertionError("unreachable")

    async def _seat(self, n: int) -> Seat:
        ticket: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._queue.append((n, ticket))
        self._admit()
        try:
            return await ticket
        except asyncio.CancelledError:
            if not ticket.cancelled():  # seated, and cancelled before it knew
                self._leave(ticket.result(), n)
            raise

    def _admit(self) -> None:
        """Seat the waiting in their order, while there is room."""
        while self._queue:
            n, ticket = self._queue[0]
            if not ticket.cancelled():
                seat = self._roomy(n)
                if seat is None:
                    return
                seat.in_flight += n
                if seat.lane.state != "generating":
                    seat.lane.switch("generating")
                ticket.set_result(seat)
            self._queue.popleft()

    def _roomy(self, n: int) -> Seat | None:
        seat = max(self.seats, key=lambda seat: seat.free)
        ahead = max(n, seat.state.slots // 4)
        return seat if seat.in_flight == 0 or seat.free + ahead >= n else None

    def _leave(self, seat: Seat, n: int) -> None:
        seat.in_flight -= n
        if seat.in_flight == 0:
            seat.lane.switch("idle")
        self._admit()


def _check_version(answer: Answer, version: int) -> None:
    if answer.version != (version, version):
        start, end = answer.version
        raise StaleRolloutError(
            f"engine {answer.engine} answered with weights of version {start}"
            + (f" to {end}" if end != start else "")
            + f" in period {version}: it missed a publication"
        )
