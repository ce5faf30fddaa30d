"""Dispatch to engines: room, order, retries, versions; with an in-memory twin of an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from rondo.engines.pool import EnginePool, Status
from rondo.engines.protocol import EngineState
from rondo.errors import EngineError, StaleRolloutError
from rondo.launch.fleet import write_evidence
from rondo.types import Answer, Confirmation, Response, Sampling

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
        self.boot = "b"
        self.dead = self.hung = False
        self.token = 1
        self.looks = 0
        self._now = 0
        self._gate = asyncio.Event()
        if not held:
            self._gate.set()

    def release(self) -> None:
        self._gate.set()

    async def state(self) -> EngineState:
        return EngineState(boot=self.boot, version=self.version, slots=self.slots, max_model_len=99)

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
        responses = (Response(token_ids=(self.token,), logps=(-1.0,), stopped=True),) * n
        return Answer(engine=self.url, boot=self.boot, version=(self.version, self.version), responses=responses)

    async def health(self) -> None:
        self.looks += 1
        if self.hung:
            await asyncio.sleep(60)
        if self.dead:
            raise EngineError(f"{self.url} refused the connection")

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def reset_prefix_cache(self) -> None: ...
    async def prompt_logps(self, token_ids): ...
    async def start_update(self): ...
    async def update(self, info): ...
    async def finish_update(self): ...


async def pool_of(*engines: FakeEngine, max_retries: int = 2, **options: Any) -> EnginePool:
    pool = EnginePool(max_retries=max_retries, on_retry=lambda error: None, **options)
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


def test_what_a_lost_engine_was_asked_goes_to_others_with_the_same_seeds_and_costs_no_retry():
    async def scenario() -> None:
        dying, other = FakeEngine("dying", held=True), FakeEngine("other", slots=64, held=True)
        pool = await pool_of(dying, max_retries=0)
        asked = [ask(pool, number) for number in range(3)]
        await asyncio.sleep(0.01)
        await pool.add(other)
        pool.lose(pool.seats[0], "it hangs")
        other.release()
        await asyncio.gather(*asked)
        assert sorted(other.asked) == sorted(dying.asked)
        assert (pool.retries, pool.moved, pool.seats[0].in_flight) == (0, 3, 0)
        assert pool.seats[0].lane.state == "lost"

    asyncio.run(scenario())


def test_with_no_engine_left_requests_wait_and_go_on_in_their_order_when_one_is_back():
    async def scenario() -> None:
        first, again = FakeEngine(held=True), FakeEngine()
        pool = await pool_of(first)
        asked = [ask(pool, number) for number in range(4)]
        await asyncio.sleep(0.01)
        pool.lose(pool.seats[0], "it ended")
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in asked)
        assert pool.waiting == 4
        again.boot = "new"
        pool.readmit(pool.seats[0], again, await again.state())
        await asyncio.sleep(0.01)
        assert again.asked == []  # not before it was fed
        pool.confirm(pool.seats[0], Confirmation(engine="a", boot="new", version=0, checksum=""))
        await asyncio.gather(*asked)
        assert sorted(seed for _, seed in again.asked) == [0, 1, 2, 3]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["dead", "hung"])
def test_a_failed_request_is_a_reason_to_look_whether_its_engine_lives(how):
    async def scenario() -> None:
        sick, other = FakeEngine("sick", failures=9, slots=8), FakeEngine("other", slots=2)
        setattr(sick, how, True)
        pool = await pool_of(sick, other, max_retries=0, health_seconds=0.05)
        answer = await ask(pool, 1)
        assert (answer.engine, pool.retries, pool.moved) == ("other", 0, 1)
        assert pool.seats[0].status is Status.LOST
        assert pool.seats[0].reason == "out of order"

    asyncio.run(scenario())


def test_a_request_that_failed_on_one_engine_is_tried_on_another():
    async def scenario() -> None:
        faulty, other = FakeEngine("faulty", failures=9, slots=64), FakeEngine("other", slots=4)
        pool = await pool_of(faulty, other, max_retries=1)
        assert (await ask(pool, 1)).engine == "other"
        assert (len(faulty.asked), len(other.asked)) == (1, 1)

    asyncio.run(scenario())


def test_the_answer_of_another_process_at_the_same_address_is_void():
    async def scenario() -> None:
        engine, other = FakeEngine("a", slots=8), FakeEngine("b", slots=2)
        pool = await pool_of(engine, other, max_retries=0)
        engine.boot = "restarted"
        assert (await ask(pool, 1)).engine == "b"
        assert "another process answers at its address" in pool.seats[0].reason

    asyncio.run(scenario())


def test_garbage_ends_the_run_with_the_evidence(tmp_path):
    async def scenario() -> None:
        liar = FakeEngine("http://liar")
        liar.token = 77
        pool = await pool_of(liar, max_retries=1, evidence=lambda record: write_evidence(tmp_path, record))
        pool.seats[0].state = dataclasses.replace(pool.seats[0].state, shape={"vocab_size": 32})
        with pytest.raises(EngineError, match=r"failed 2 times .* token 77 of a vocabulary of 32; all of it is in .*"):
            await ask(pool, 5)

    asyncio.run(scenario())
    record = json.loads((tmp_path / "request-0.json").read_text())
    assert (record["asked"]["prompt"], record["asked"]["seed"], len(record["failures"])) == ([5], 5, 2)
    assert "token_ids=(77,)" in record["failures"][0]["answer"]


def test_a_draining_engine_finishes_what_it_has_and_gets_no_more():
    async def scenario() -> None:
        leaver, other = FakeEngine("leaver", slots=8, held=True), FakeEngine("other", slots=4)
        pool = await pool_of(leaver)
        first = ask(pool, 0)
        await asyncio.sleep(0)
        drained = asyncio.ensure_future(pool.drain(pool.seats[0]))
        await pool.add(other)
        assert (await ask(pool, 1)).engine == "other"
        assert not drained.done()
        leaver.release()
        await drained
        assert (await first).engine == "leaver"
        pool.remove(pool.seats[0])
        assert [seat.engine.url for seat in pool.seats] == ["other"]

    asyncio.run(scenario())


def test_an_engine_that_must_leave_now_hands_its_requests_to_others():
    async def scenario() -> None:
        leaver, other = FakeEngine("leaver", slots=8, held=True), FakeEngine("other", slots=4)
        pool = await pool_of(leaver)
        asked = ask(pool, 0)
        await asyncio.sleep(0.01)
        await pool.add(other)
        pool.remove(pool.seats[0])
        assert (await asked).engine == "other"

    asyncio.run(scenario())


def test_when_no_engine_will_come_back_whoever_waits_is_told():
    async def scenario() -> None:
        pool = await pool_of(FakeEngine(held=True))
        pool.lose(pool.seats[0], "it ended")
        waiting = ask(pool, 1)
        await asyncio.sleep(0.01)
        pool.end(EngineError("no engine is left"))
        for asked in (waiting, ask(pool, 2)):
            with pytest.raises(EngineError, match="no engine is left"):
                await asked

    asyncio.run(scenario())
