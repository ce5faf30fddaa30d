"""All engines of a run: who gets the next request, and what happens when one fails.

`generate` waits until an engine has room (woken by whichever request ends, or by an engine that becomes ready), in the
order in which it was called. The engine with the most free slots takes the next group. A little more than the slots is
kept in flight, so that a freed slot is refilled without a round trip.

A request whose engine is lost moves to another one with the same seed, as often as it must: that is not its fault. A
request that fails while its engine lives is tried again, elsewhere if there is an elsewhere, `max_retries` times; then
what was asked and answered is kept as evidence, and the run stops. With no engine ready, requests wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rondo.engines.http import NonsenseError, RefusedError, RestartedError
from rondo.engines.protocol import Engine, EngineState
from rondo.engines.seat import LostError, Member, Seat, Status
from rondo.errors import EngineError, StaleRolloutError
from rondo.types import Answer, Confirmation, Sampling

__all__ = ["EnginePool", "LostError", "Member", "Seat", "Status"]


@dataclass(frozen=True, kw_only=True)
class _Ticket:
    n: int
    avoid: frozenset[Seat]  # where the request failed already
    seat: asyncio.Future[Seat]


class EnginePool:
    def __init__(
        self,
        *,
        max_retries: int,
        on_retry: Callable[[EngineError], None],
        on_lost: Callable[[Seat], None] = lambda seat: None,
        evidence: Callable[[Mapping[str, Any]], Path] | None = None,
        health_seconds: float = 10.0,
    ) -> None:
        self.seats: list[Seat] = []
        self.retries = 0  # requests that failed on a living engine
        self.moved = 0  # requests whose engine was lost
        self._max_retries = max_retries
        self._on_retry = on_retry
        self._on_lost = on_lost
        self._evidence = evidence
        self._health_seconds = health_seconds
        self._queue: deque[_Ticket] = deque()
        self._emptied: dict[Seat, asyncio.Event] = {}  # who waits for a seat to drain
        self._over: Exception | None = None

    @property
    def ready(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.status is Status.READY]

    @property
    def waiting(self) -> int:
        """Requests that no engine has taken yet."""
        return sum(not ticket.seat.done() for ticket in self._queue)

    async def add(self, engine: Engine, *, name: str = "") -> Seat:
        """A new engine that takes work at once: before the first publication, or one that holds its weights."""
        return self._sit(Seat(engine=engine, state=await engine.state(), name=name))

    def admit(self, engine: Engine, state: EngineState) -> Seat:
        """A newcomer, who must be fed before it takes work."""
        return self._sit(Seat(engine=engine, state=state, status=Status.JOINING))

    def _sit(self, seat: Seat) -> Seat:
        self.seats.append(seat)
        if seat.status is not Status.READY:
            seat.lane.switch(seat.status.value)
        self._admit()
        return seat

    def readmit(self, seat: Seat, engine: Engine, state: EngineState) -> None:
        """A lost engine is back, or a new process in its place: to be fed before it takes work."""
        seat.engine, seat.state = engine, state
        seat.become(Status.JOINING)
        seat.lane.switch(Status.JOINING.value)

    def confirm(self, seat: Seat, confirmation: Confirmation) -> None:
        """It holds the current publication: it takes work from here on."""
        seat.state = replace(seat.state, boot=confirmation.boot, version=confirmation.version)
        if seat.status is Status.JOINING:
            seat.become(Status.READY)
            seat.lane.switch("idle")
            self._admit()

    def lose(self, seat: Seat, reason: str) -> None:
        """Out of the pool: what it was asked goes to others."""
        if seat.status is Status.LOST:
            return
        seat.become(Status.LOST, reason)
        seat.losses += 1
        seat.lane.switch(Status.LOST.value)
        seat.let_go()
        if (emptied := self._emptied.get(seat)) is not None:
            emptied.set()
        self._on_lost(seat)

    async def drain(self, seat: Seat) -> None:
        """No new requests; returns when the last one has been answered, or the engine is lost."""
        if seat.status is Status.READY:
            seat.become(Status.DRAINING)
        if seat.in_flight and seat.status is Status.DRAINING:
            await self._emptied.setdefault(seat, asyncio.Event()).wait()
        self._emptied.pop(seat, None)

    def remove(self, seat: Seat) -> None:
        """For good; what is still asked of it goes to others."""
        if seat in self.seats:
            self.seats.remove(seat)
        if seat.status is not Status.LOST:
            seat.become(Status.LOST, "it was asked to leave")
            seat.let_go()

    def end(self, error: Exception) -> None:
        """No engine will come any more: whoever waits for one, or asks from here on, is told so."""
        self._over = error
        for ticket in self._queue:
            if not ticket.seat.done():
                ticket.seat.set_exception(error)
        self._queue.clear()

    def receivers(self) -> list[Member]:
        """Who takes part in a publication."""
        return [Member(seat) for seat in self.seats if seat.status in (Status.READY, Status.JOINING)]

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling, version: int) -> Answer:
        """An answer of exactly this version; a failed request is sent again, with the same seed."""
        failures: list[tuple[str, EngineError]] = []
        avoid: set[Seat] = set()
        while True:
            seat = await self._seat(n, frozenset(avoid))
            try:
                answer = await seat.call(seat.engine.generate(prompt, n=n, seed=seed, sampling=sampling))
                self._check(seat, answer, version)
                seat.answers(sum(len(response.token_ids) for response in answer.responses))
                return answer
            except EngineError as error:
                if not await self._lives(seat, error):
                    self.moved += 1
                    continue
                seat.retries += 1
                failures.append((seat.label, error))
                if len(failures) > self._max_retries:
                    asked = {"prompt": list(prompt), "n": n, "seed": seed, "version": version}
                    raise self._given_up(asked | {"sampling": repr(sampling)}, failures) from error
                avoid.add(seat)
                self.retries += 1
                self._on_retry(error)
            finally:
                self._leave(seat, n)
            await asyncio.sleep(min(5.0, 0.1 * 2 ** (len(failures) - 1)))

    async def _lives(self, seat: Seat, error: EngineError) -> bool:
        """Whether an engine whose request failed is still there; it is lost if not."""
        if isinstance(error, RestartedError):
            self.lose(seat, str(error))
        elif not isinstance(error, (LostError, NonsenseError, RefusedError, StaleRolloutError)):  # these are answers
            await self.examine(seat, reason=str(error))
        return seat.status is not Status.LOST

    async def examine(self, seat: Seat, *, reason: str = "") -> bool:
        """Ask for a sign of life; an engine that gives none is lost."""
        for _ in range(2):
            try:
                await asyncio.wait_for(seat.call(seat.engine.health()), self._health_seconds)
                return True
            except LostError:
                return False
            except TimeoutError:
                found = f"it did not answer /health within {self._health_seconds:g} s"
                break
            except EngineError as error:
                found = str(error)
        self.lose(seat, reason or found)
        return False

    def _check(self, seat: Seat, answer: Answer, version: int) -> None:
        if answer.boot != seat.state.boot:
            self.lose(seat, "another process answers at its address: it was restarted, and may hold other weights")
            raise LostError(f"{seat.label} was restarted: its answer is void")
        if answer.version != (version, version):
            start, end = answer.version
            raise StaleRolloutError(
                f"engine {answer.engine} answered with weights of version {start}"
                + (f" to {end}" if end != start else "")
                + f" in period {version}: it missed a publication"
            )
        vocabulary = seat.state.shape.get("vocab_size", 0)
        worst = max(max(response.token_ids) for response in answer.responses)
        least = min(min(response.token_ids) for response in answer.responses)
        if least < 0 or (vocabulary and worst >= vocabulary):
            raise NonsenseError(
                f"engine {answer.engine} answered nonsense: token {least if least < 0 else worst} of a vocabulary of "
                f"{vocabulary}",
                answer=repr(answer),
            )

    def _given_up(self, asked: Mapping[str, Any], failures: Sequence[tuple[str, EngineError]]) -> EngineError:
        last = failures[-1][1]
        if self._evidence is None:
            return last
        record = [
            {"engine": label, "error": str(error), "answer": getattr(error, "answer", None)}
            for label, error in failures
        ]
        path = self._evidence({"asked": dict(asked), "failures": record})
        kind = StaleRolloutError if isinstance(last, StaleRolloutError) else EngineError
        times = f"{len(failures)} times" if len(failures) > 1 else "once"
        return kind(f"a request failed {times} (engines.max_retries); the last time: {last}; all of it is in {path}")

    async def _seat(self, n: int, avoid: frozenset[Seat]) -> Seat:
        if self._over is not None:
            raise self._over
        ticket = _Ticket(n=n, avoid=avoid, seat=asyncio.get_running_loop().create_future())
        self._queue.append(ticket)
        self._admit()
        try:
            return await ticket.seat
        except asyncio.CancelledError:
            if not ticket.seat.cancelled() and ticket.seat.exception() is None:  # seated, and cancelled before it knew
                self._leave(ticket.seat.result(), n)
            raise

    def _admit(self) -> None:
        """Seat the waiting in their order, while there is room."""
        while self._queue:
            ticket = self._queue[0]
            if not ticket.seat.cancelled():
                seat = self._roomy(ticket)
                if seat is None:
                    return
                seat.in_flight += ticket.n
                if seat.lane.state != "generating":
                    seat.lane.switch("generating")
                ticket.seat.set_result(seat)
            self._queue.popleft()

    def _roomy(self, ticket: _Ticket) -> Seat | None:
        ready = self.ready
        seats = [seat for seat in ready if seat not in ticket.avoid] or ready
        if not seats:
            return None
        seat = max(seats, key=lambda seat: seat.free)
        ahead = max(ticket.n, seat.state.slots // 4)
        return seat if seat.in_flight == 0 or seat.free + ahead >= ticket.n else None

    def _leave(self, seat: Seat, n: int) -> None:
        seat.in_flight -= n
        if seat.in_flight == 0:
            if seat.status in (Status.READY, Status.DRAINING):
                seat.lane.switch("idle")
            if (emptied := self._emptied.get(seat)) is not None:
                emptied.set()
        self._admit()
