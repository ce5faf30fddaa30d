"""Dispatch to engines: room, order, retries, versions; with an in-memory twin of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rondo.engines.pool import EnginePool
from rondo.engines.protocol import EngineState
from rondo.errors import EngineError, StaleRolloutError
from rondo.types import Answer, Response, Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(0,))


class FakeEngine:
    """Answers when told to; fails as often as told to."""

    def __init__(self, name: str = "a", *, slots: int = 4, version: int = 0, failures: int = 0, held: bool = False):
        self.url = name
        self.slots = slots
        self.version = version
        self.failures = failures
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.most = 0
        self._now = 0
        self._gate = asyncio.Event()
        if not held:
            self._gate.set()

    def release(self) -> None:
        self._gate.set()

    async def state(self) -> EngineState:
        return EngineState(boot="b", version=self.version, slots=self.slots, max_model_len=99)

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling) -> Answer:
        self.asked.append((tuple(prompt), seed))
        self._now += n
        self.most = max(self.most, self._now)
        await self._gate.wait()
        await asyncio.sleep(0)
        self._now -= n
        if self.failures:
            self.failures -= 1
            raise EngineError("out of order")
        responses = (Response(token_ids=(1,), logps=(-1.0,), stopped=True),) * n
        return Answer(engine=self.url, boot="b", version=(self.version, self.version), responses=responses)

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def reset_prefix_cache(self) -> None: ...
    async def prompt_logps(self, token_ids): ...
    async def start_update(self): ...
    async def update(self, info): ...
    async def finish_update(self): ...


async def pool_of(*engines: FakeEngine, max_retries: int = 2) -> EnginePool:
    pool = EnginePool(max_retries=max_retries, on_retry=lambda error: None)
    for engine in engines:
        await pool.add(engine)
    return pool


def ask(pool: EnginePool, number: int, n: int = 2, version: int = 0):
    return asyncio.ensure_future(pool.generate([number], n=n, seed=number, sampling=SAMPLING, version=version))


def test_no_more_is_in_flight_than_the_slots_and_one_group_ahead():
    async def scenario() -> None:
        engine = FakeEngine(slots=4, held=True)
        pool = await pool_of(engine)
        asked = [ask(pool, number) for number in range(10)]
        await asyncio.sleep(0.01)
        assert [prompt for (prompt,), _ in engine.asked] == [0, 1, 2]
        engine.release()
        await asyncio.gather(*asked)
        assert engine.most <= 6
        assert [prompt for (prompt,), _ in engine.asked] == list(range(10))

    asyncio.run(scenario())


def test_the_engine_with_the_most_free_slots_takes_the_next_group():
    async def scenario() -> None:
        small, large = FakeEngine("small", slots=2, held=True), FakeEngine("large", slots=8, held=True)
        pool = await pool_of(small, large)
        asked = [ask(pool, number) for number in range(5)]
        await asyncio.sleep(0.01)
        assert (len(small.asked), len(large.asked)) == (1, 4)
        small.release()
        large.release()
        await asyncio.gather(*asked)

    asyncio.run(scenario())


def test_a_failed_request_is_sent_again_with_the_same_seed():
    async def scenario() -> None:
        engine = FakeEngine(failures=2)
        pool = await pool_of(engine)
        answer = await ask(pool, 5)
        assert len(answer.responses) == 2
        assert engine.asked == [((5,), 5)] * 3
        assert pool.retries == 2

    asyncio.run(scenario())


def test_after_the_last_retry_the_reason_is_raised_and_the_seat_is_free():
    async def scenario() -> None:
        pool = await pool_of(FakeEngine(failures=9), max_retries=1)
        with pytest.raises(EngineError, match="out of order"):
            await ask(pool, 0)
        assert pool.seats[0].in_flight == 0

    asyncio.run(scenario())


def test_an_answer_of_another_version_is_refused():
    async def scenario() -> None:
        pool = await pool_of(FakeEngine(version=3), max_retries=0)
        with pytest.raises(StaleRolloutError, match="version 3 in period 4"):
            await ask(pool, 0, version=4)

    asyncio.run(scenario())


def test_cancelled_requests_give_their_seats_back():
    async def scenario() -> None:
        engine = FakeEngine(slots=2, held=True)
        pool = await pool_of(engine)
        asked = [ask(pool, number) for number in range(6)]
        await asyncio.sleep(0.01)
        for task in asked[:5]:
            task.cancel()
        await asyncio.gather(*asked[:5], return_exceptions=True)
        engine.release()
        await asked[5]
        assert pool.seats[0].in_flight == 0
        assert pool.seats[0].lane.state == "idle"

    asyncio.run(scenario())
