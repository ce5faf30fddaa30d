"""Membership: who is looked at, who is lost, and how they come back; with in-memory engines and a hand-held feeder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rondo.engines.keeper import GoneError, Keeper, KeeperSettings
from rondo.engines.pool import EnginePool, Seat, Status
from rondo.engines.protocol import EngineState
from rondo.errors import AddressError, EngineError, PublicationError, RondoError
from rondo.types import Confirmation
from tests.unit.test_pool import FakeEngine


class FakeFeeder:
    """Feeds version 7; or fails, or is interrupted by a publication, as told."""

    def __init__(self) -> None:
        self.under_way = False
        self.fed: list[str] = []
        self.failures: list[Exception] = []
        self.instead: Callable[[Any], None] | None = None  # what a publication in between does

    async def feed(self, receiver: Any) -> Confirmation | None:
        await asyncio.sleep(0)
        if self.instead is not None:
            self.instead(receiver)
            return None
        if self.failures:
            raise self.failures.pop(0)
        self.fed.append(receiver.url)
        return Confirmation(engine=receiver.url, boot=receiver.seat.state.boot, version=7, checksum="c")


class FakeOrigin:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.next: asyncio.Queue[FakeEngine | Exception] = asyncio.Queue()

    def lost(self, seat: Seat) -> None:
        self.told.append("lost")

    def left(self, seat: Seat) -> None:
        self.told.append("left")

    async def again(self, seat: Seat, attempt: int) -> FakeEngine:
        found = await self.next.get()
        if isinstance(found, Exception):
            raise found
        return found


class Scene:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.over: list[RondoError] = []
        self.feeder, self.origin = FakeFeeder(), FakeOrigin()
        self.pool = EnginePool(max_retries=0, on_retry=lambda error: None, on_lost=lambda seat: self.keeper.lost(seat))
        self.keeper = Keeper(
            pool=self.pool,
            settings=KeeperSettings(every=0.01, deadline=0.03),
            origin=lambda seat: self.origin,
            check=self._check,
            say=self.said.append,
            on_over=self.over.append,
        )
        self.keeper.begin(self.feeder)

    def _check(self, url: str, state: EngineState) -> None:
        if state.max_model_len < 50:
            raise AddressError(f"engine {url} serves too little")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event of its own)
            await asyncio.sleep(0.005)


def play(scenario: Callable[[Scene], Any]) -> Scene:
    async def run() -> Scene:
        scene = Scene()
        watching = asyncio.ensure_future(scene.keeper.watch())
        try:
            await scenario(scene)
        finally:
            watching.cancel()
            await scene.keeper.close()
        return scene

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dead", "refused the connection"),
        ("hung", "no sign of life 2 times within 0.03 s"),
        ("boot", "another process answers at its address"),
    ],
)
def test_a_sick_engine_is_found_by_looking_and_its_successor_is_fed_before_it_works(fault, reason):
    async def scenario(scene: Scene) -> None:
        engine = FakeEngine("http://e")
        seat = await scene.pool.add(engine, name="engine-0")
        setattr(engine, fault, "other" if fault == "boot" else True)
        await until(lambda: seat.status is Status.LOST)
        assert reason in seat.reason
        assert scene.origin.told == ["lost"]
        assert "no engine is left: the period waits" in scene.said[-1]
        successor = FakeEngine("http://new")
        successor.boot = "new"
        scene.origin.next.put_nowait(successor)
        await until(lambda: seat.status is Status.READY)
        assert scene.feeder.fed == ["http://new"]
        assert (seat.engine, seat.state.version, seat.state.boot) == (successor, 7, "new")
        await until(lambda: "is back, with version 7" in scene.said[-1])

    play(scenario)


@pytest.mark.parametrize("fault", ["hung", "dead"])
def test_one_missing_sign_of_life_is_no_death(fault):
    async def scenario(scene: Scene) -> None:
        engine = FakeEngine()
        seat = await scene.pool.add(engine)
        setattr(engine, fault, True)
        looks = engine.looks
        await until(lambda: engine.looks > looks)
        setattr(engine, fault, False)
        await asyncio.sleep(0.2)
        assert seat.status is Status.READY

    play(scenario)


def test_a_publication_in_between_takes_the_returning_engine_along():
    async def scenario(scene: Scene) -> None:
        seat = await scene.pool.add(FakeEngine("http://e"))

        def publish(member: Any) -> None:
            scene.feeder.instead = None
            scene.pool.confirm(member.seat, Confirmation(engine="e", boot="b", version=8, checksum="d"))

        scene.feeder.instead = publish
        scene.pool.lose(seat, "it hangs")
        scene.origin.next.put_nowait(FakeEngine("http://e"))
        await until(lambda: seat.status is Status.READY)
        assert (seat.state.version, scene.feeder.fed) == (8, [])

    play(scenario)


def test_an_engine_that_cannot_take_its_weights_is_tried_again_and_then_given_up():
    async def scenario(scene: Scene) -> None:
        seat = await scene.pool.add(FakeEngine("http://e"), name="engine-0")
        scene.feeder.failures = [PublicationError("its checksum is wrong")] * 9
        scene.pool.lose(seat, "it hangs")
        for _ in range(9):
            scene.origin.next.put_nowait(FakeEngine("http://e"))
        await until(lambda: bool(scene.over))
        assert seat.gone
        assert "engine-0 (http://e): it came back 5 times" in str(scene.over[0])
        assert "its checksum is wrong" in str(scene.over[0])

    play(scenario)


def test_the_run_ends_only_when_the_last_engine_is_given_up():
    async def scenario(scene: Scene) -> None:
        one, other = await scene.pool.add(FakeEngine("http://1")), await scene.pool.add(FakeEngine("http://2"))
        scene.pool.lose(one, "it ended")
        scene.origin.next.put_nowait(GoneError("it ended 6 times"))
        await until(lambda: one.gone)
        assert not scene.over
        scene.pool.lose(other, "it ended")
        scene.origin.next.put_nowait(GoneError("so did this"))
        await until(lambda: bool(scene.over))
        assert "no engine is left that could come back" in str(scene.over[0])
        assert "it ended 6 times" in str(scene.over[0])

    play(scenario)


def test_a_newcomer_is_fed_and_takes_work_and_one_that_cannot_serve_the_run_is_refused():
    async def scenario(scene: Scene) -> None:
        seat = await scene.keeper.join(FakeEngine("http://new"))
        assert (seat.status, scene.feeder.fed) == (Status.READY, ["http://new"])
        with pytest.raises(EngineError, match="takes part already"):
            await scene.keeper.join(FakeEngine("http://new"))
        scene.feeder.failures = [PublicationError("no room")]
        with pytest.raises(PublicationError, match="no room"):
            await scene.keeper.join(FakeEngine("http://small"))
        assert [seat.engine.url for seat in scene.pool.seats] == ["http://new"]

    play(scenario)


def test_who_leaves_is_not_brought_back():
    async def scenario(scene: Scene) -> None:
        seat = await scene.pool.add(FakeEngine("http://e"))
        await scene.keeper.leave(seat, now=False)
        assert (scene.pool.seats, scene.origin.told) == ([], ["left"])
        await asyncio.sleep(0.05)
        assert not scene.keeper._returning

    play(scenario)
