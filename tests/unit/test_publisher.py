"""The ordering contract of a publication, with hand-written receivers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from rondo.errors import EngineError, PublicationError
from rondo.observe.lane import Lane
from rondo.rollout.background import Background
from rondo.types import Confirmation
from rondo.weights.bucket import Named, buckets
from rondo.weights.checksum import Checksum, checksum
from rondo.weights.probe import Probe
from rondo.weights.publisher import Publisher
from rondo.weights.receive import Receiver
from rondo.weights.shelf import Shelf
from rondo.weights.store import Store
from rondo.weights.stored import StoredTransport

WEIGHTS = [(f"t{number}", torch.arange(6.0).reshape(2, 3) + number) for number in range(5)]
BUCKET = 2 * 6 * 4  # bytes: two tensors each


class FakeReceiver:
    def __init__(self, name: str, log: list[str], *, failures: Sequence[str] = ()) -> None:
        self.url = name
        self.log = log
        self.failures = list(failures)  # what goes wrong, once each
        self.dead = self.stuck = False
        self.held: dict[str, torch.Tensor] = {}
        self._receiver = Receiver()
        self._announced = ""

    async def _note(self, what: str) -> None:
        await asyncio.sleep(0.001 if self.url == "slow" else 0)
        self.log.append(f"{what} {self.url}")
        if self.stuck:
            await asyncio.sleep(60)
        if self.failures and self.failures[0] == what:
            self.failures.pop(0)
            raise EngineError(f"engine {self.url} failed at {what}")

    async def health(self) -> None:
        if self.dead:
            raise EngineError(f"engine {self.url} refused the connection")

    async def pause(self) -> None:
        await self._note("pause")

    async def start_update(self) -> None:
        await self._note("start")
        self._receiver.begin()
        self._total, self.held = Checksum(), {}

    async def update(self, info: Any) -> None:
        await self._note("update")
        self.version = info["version"]
        if "checksum" in info:
            self._announced = info["checksum"]
            return
        for name, tensor in self._receiver.receive(info):
            self.held[name] = tensor.clone()
            self._total.add(name, tensor)

    async def finish_update(self) -> Confirmation:
        await self._note("finish")
        wrong = self.failures and self.failures[0] == "checksum" and self.failures.pop(0)
        self._receiver.sealed(self.version)
        held = "0" if wrong else self._total.digest()
        return Confirmation(engine=self.url, boot="b", version=self.version, checksum=held)

    async def reset_prefix_cache(self) -> None:
        await self._note("reset")

    async def resume(self) -> None:
        await self._note("resume")


async def _here(url: str) -> None:
    """Every engine is on this host."""


async def _nothing() -> None: ...


class Desk:
    """A publisher over files in `folder`, with its loop, and all that it said."""

    def __init__(self, folder: Path, *receivers: FakeReceiver, delta: bool = False) -> None:
        self.background = Background("test")
        self.repeats: list[str] = []
        self.probed: list[int] = []
        self.weights = list(WEIGHTS)
        self.passes = 0
        self.held: list[str] = []
        self.failed: dict[str, str] = {}
        self.probed_one: list[str] = []
        store = Store(folder, torch.float32)
        self.publisher = Publisher(
            transport=StoredTransport(name="files", store=store, delta=delta),
            shelf=Shelf(store, written=True, keep=delta, elsewhere=_here, on_close=_nothing),
            weights=self._iterate,
            dtype=torch.float32,
            bucket_bytes=BUCKET,
            receivers=lambda: receivers,
            submit=self.background.submit,
            probe=lambda version, engines: self.probed.append(version),
            on_repeat=self.repeats.append,
            lane=Lane(),
            on_held=lambda receiver, confirmation: self.held.append(receiver.url),
            on_failed=lambda receiver, reason: self.failed.__setitem__(receiver.url, reason),
            probe_one=self._probe_one,
        )

    async def _probe_one(self, receiver: FakeReceiver) -> None:
        self.probed_one.append(receiver.url)

    def _iterate(self) -> Iterator[Named]:
        yield from self.weights
        self.passes += 1

    def close(self) -> None:
        self.publisher.close()
        self.background.close()


@pytest.fixture
def desk(tmp_path):
    made = []

    def make(*receivers: FakeReceiver, delta: bool = False) -> Desk:
        made.append(Desk(tmp_path / "weights", *receivers, delta=delta))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_no_engine_passes_a_stage_before_all_have_reached_it(desk):
    log: list[str] = []
    made = desk(FakeReceiver("fast", log), FakeReceiver("slow", log))
    made.publisher.publish(version=1)
    stages = [line.split()[0] for line in log]
    assert set(stages[:4]) == {"pause", "start"}
    assert stages[4:] == ["update"] * 8 + ["finish"] * 2 + ["reset"] * 2 + ["resume"] * 2  # 3 buckets and the checksum
    assert made.probed == [1]


def test_engines_receive_the_very_bits_in_order(desk):
    receiver = FakeReceiver("fast", [])
    desk(receiver).publisher.publish(version=1)
    assert checksum(receiver.held.items()) == checksum(WEIGHTS)


@pytest.mark.parametrize("failure", ["pause", "start", "update", "finish", "checksum"])
def test_what_goes_wrong_once_is_said_and_repeated(desk, failure):
    log: list[str] = []
    liar = FakeReceiver("liar", log, failures=[failure])
    made = desk(FakeReceiver("fast", log), liar)
    made.publisher.publish(version=1)
    assert len(made.repeats) == 1
    assert "liar" in made.repeats[0]
    assert checksum(liar.held.items()) == checksum(WEIGHTS)
    first = log.index("resume fast")
    assert not [line for line in log[:first] if line.startswith("resume")]


def test_what_every_living_engine_refuses_twice_is_an_error_and_nobody_resumes(desk):
    log: list[str] = []
    made = desk(FakeReceiver("liar", log, failures=["checksum", "checksum"]))
    with pytest.raises(PublicationError, match="engine liar holds version 1 with checksum 0"):
        made.publisher.publish(version=1)
    assert not [line for line in log if line.startswith("resume")]
    assert not made.probed


def test_an_engine_that_fails_twice_leaves_and_the_others_go_on(desk):
    log: list[str] = []
    made = desk(FakeReceiver("fast", log), FakeReceiver("liar", log, failures=["checksum", "checksum"]))
    made.publisher.publish(version=1)
    assert made.held == ["fast"]
    assert "holds version 1 with checksum 0" in made.failed["liar"]
    assert "resume liar" not in log
    assert made.publisher.confirmed.engines == 1


@pytest.mark.parametrize("stage", ["pause", "start", "update", "finish", "reset", "resume"])
def test_the_publication_goes_on_without_an_engine_that_dies_in_it(desk, stage):
    log: list[str] = []
    dead = FakeReceiver("dead", log, failures=[stage])
    dead.dead = True
    made = desk(FakeReceiver("fast", log), dead)
    made.publisher.publish(version=1)
    assert (made.held, list(made.failed), made.repeats) == (["fast"], ["dead"], [])
    made.publisher.publish(version=2)  # and the next one is whole again
    assert made.held[-1] in ("fast", "dead")


def test_a_publication_that_finds_nobody_alive_is_kept_for_whoever_comes(desk):
    dead = FakeReceiver("dead", [], failures=["pause"])
    dead.dead = True
    made = desk(dead)
    made.publisher.publish(version=1)
    assert made.publisher.confirmed.engines == 0
    newcomer = FakeReceiver("new", [])
    confirmation = made.background.call(made.publisher.feed(newcomer))
    assert confirmation.version == 1
    assert checksum(newcomer.held.items()) == checksum(WEIGHTS)
    assert made.probed_one == ["new"]


@pytest.mark.parametrize("delta", [False, True])
def test_a_newcomer_is_fed_what_was_published_not_what_the_trainer_holds_now(desk, delta):
    made = desk(FakeReceiver("old", []), delta=delta)
    made.publisher.publish(version=1)
    made.weights = [(name, tensor + 1) for name, tensor in WEIGHTS]
    made.publisher.publish(version=2)
    published, made.weights = made.weights, [(name, tensor * 0) for name, tensor in WEIGHTS]
    newcomer = FakeReceiver("new", [])
    assert made.background.call(made.publisher.feed(newcomer)).version == 2
    assert checksum(newcomer.held.items()) == checksum(published)


def test_a_publication_ends_a_feed_and_takes_the_newcomer_along(desk):
    receivers = [FakeReceiver("old", [])]
    made = desk(*receivers)
    made.publisher._receivers = lambda: receivers
    made.publisher.publish(version=1)
    newcomer = FakeReceiver("new", [])
    newcomer.stuck = True
    fed = made.background.submit(made.publisher.feed(newcomer))
    while not newcomer.log:
        time.sleep(0.001)
    newcomer.stuck = False
    receivers.append(newcomer)
    made.publisher.publish(version=2)
    assert fed.result() is None
    assert (newcomer.version, made.held[-2:]) == (2, ["old", "new"])


def test_other_ranks_are_never_left_in_the_middle_of_the_weights(desk):
    made = desk(FakeReceiver("dead", [], failures=["update"] * 9))
    with pytest.raises(PublicationError, match="version 1 could not be published: engine dead failed at update"):
        made.publisher.publish(version=1)
    assert made.passes == 2


def test_two_generations_of_files_take_turns_and_go_with_the_publisher(desk, tmp_path):
    made = desk(FakeReceiver("fast", []))
    folder = tmp_path / "weights"
    for version in (1, 2, 3):
        made.publisher.publish(version=version)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"{turn}-000{number}.safetensors" for turn in ("even", "odd") for number in range(3)]
    made.publisher.close()
    assert not folder.exists()


def test_with_delta_only_changes_travel_and_a_newcomer_or_a_repeat_gets_everything(desk):
    receivers = [FakeReceiver("old", [])]
    made = desk(*receivers, delta=True)
    made.publisher._receivers = lambda: receivers
    made.publisher.publish(version=0)
    whole = made.publisher.bytes
    changed = WEIGHTS[3][1].clone()
    changed[1, 1] += 1
    made.weights[3] = ("t3", changed)
    made.publisher.publish(version=1)
    assert made.publisher.bytes < whole / 4
    receivers.append(FakeReceiver("new", []))
    made.publisher.publish(version=2)
    assert made.publisher.bytes == whole
    receivers[0].failures = ["update"]
    made.publisher.publish(version=3)
    assert made.publisher.bytes == whole
    for receiver in receivers:
        assert checksum(receiver.held.items()) == checksum(made.weights)


def test_an_engine_that_lost_the_last_publication_gets_all_of_the_next(desk):
    receiver = FakeReceiver("restarted", [])
    made = desk(receiver, delta=True)
    made.publisher.publish(version=0)
    receiver._receiver = Receiver()  # a new process behind the old address
    made.publisher.publish(version=1)
    assert "changes since version 0 were sent, but this engine holds None" in made.repeats[0]
    assert checksum(receiver.held.items()) == checksum(WEIGHTS)


def test_buckets_leave_when_they_are_full_and_nothing_is_lost():
    taken = []

    def weights():
        for number in range(5):
            taken.append(number)
            yield f"t{number}", torch.zeros(10 if number != 2 else 100)

    portions = buckets(weights(), dtype=torch.bfloat16, limit=40)
    first = next(portions)
    assert [name for name, _ in first.tensors] == ["t0", "t1"]
    assert taken == [0, 1, 2]  # not all of them: the next ones are not even gathered
    assert [[name for name, _ in portion.tensors] for portion in portions] == [["t2"], ["t3", "t4"]]


class FakeEngine:
    def __init__(self, logps: list[float]) -> None:
        self.url = "engine"
        self.logps = logps

    async def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        return self.logps


def probe(own: list[float]) -> Probe:
    def submit(coroutine: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(asyncio.run(coroutine))
        return future

    return Probe(token_ids=(1, 2, 3), score=lambda token_ids: own, submit=submit, allowed=0.01)


def test_an_engine_that_scores_the_probe_as_the_trainer_does_is_trusted():
    check = probe([-1.0, -2.0])
    check(3, [FakeEngine([-1.0, -2.0]), FakeEngine([-1.002, -2.001])])
    assert check.gap == pytest.approx(0.0015)


@pytest.mark.parametrize("logps", [[-1.5, -2.0], [-1.0], [float("nan"), -2.0]])
def test_an_engine_that_computes_with_other_weights_is_found_out(logps):
    with pytest.raises(PublicationError, match="engine engine"):
        probe([-1.0, -2.0])(3, [FakeEngine(logps)])


def test_a_copy_is_made_beside_the_period_and_the_next_step_waits_for_it(tmp_path):
    """A transport that leaves no files: the shelf is filled by a thread, and a newcomer is fed what is whole."""
    engine, newcomer = FakeReceiver("http://a", []), FakeReceiver("http://b", [])
    background, gate, reading = Background("test"), Event(), Event()
    passes = []

    def weights() -> Iterator[Named]:
        passes.append(len(passes))
        if passes[-1] == 1:  # the copy's
            reading.set()
            gate.wait()
        yield from WEIGHTS

    shelf = Shelf(Store(tmp_path / "shelf", torch.float32), written=False, elsewhere=_here, on_close=_nothing)
    publisher = Publisher(
        transport=StoredTransport(name="files", store=Store(tmp_path / "weights", torch.float32), delta=False),
        shelf=shelf,
        apart=True,
        weights=weights,
        dtype=torch.float32,
        bucket_bytes=BUCKET,
        receivers=lambda: [engine],
        submit=background.submit,
        probe=lambda version, engines: None,
        on_repeat=lambda sentence: None,
        lane=Lane(),
    )
    try:
        publisher.publish(version=0)
        assert reading.wait(5)  # the engine has its weights, the copy has only begun
        assert shelf.kept is None
        fed = background.submit(publisher.feed(newcomer))
        stepping = Thread(target=publisher.may_move)
        stepping.start()
        stepping.join(0.05)
        assert stepping.is_alive()
        gate.set()
        stepping.join(5)
        assert not stepping.is_alive()
        assert fed.result(5).checksum == publisher.confirmed.checksum
        assert all(torch.equal(newcomer.held[name], tensor) for name, tensor in WEIGHTS)
    finally:
        gate.set()
        publisher.close()
        background.close()


def test_a_copy_that_fails_stops_the_run_at_the_next_step(tmp_path):
    shelf = Shelf(Store(tmp_path / "shelf", torch.float32), written=False, elsewhere=_here, on_close=_nothing)

    def broken() -> Iterator[Any]:
        raise PublicationError("no room")
        yield

    shelf.copy(broken(), version=0, checksum="c")
    with pytest.raises(PublicationError, match="no room"):
        shelf.wait()
    shelf.close()
