"""The ordering contract of a publication, in one place.

    1. every engine pauses; nothing is generated from here on
    2. buckets of weights leave as they are gathered: an engine loads one while the next is on its way
    3. every engine is told the checksum of the whole, takes the version if what it holds has it, and confirms
    4. every engine drops its cached prefixes (a prompt cached under old weights is a silent off-policy error)
    5. every engine resumes, and not before all have confirmed
    6. every engine's log-probs of a probe text are those of the trainer (a checksum does not see what is computed with)

An engine that fails in 1 to 3 falls out, and the others go on. If it still lives, the whole is repeated for it once, in
full; if that fails too, it leaves the pool. A publication that living engines refuse and none takes is an error; one
that finds no living engine is kept, and the period waits for an engine that is fed from it.

Whoever comes between two publications is fed the last one from where it is kept (`feed`, in the engines' loop). A
publication that starts meanwhile ends that and takes the newcomer along.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from rondo.errors import EngineError, PublicationError, UnreachableError
from rondo.observe.lane import Lane
from rondo.types import Confirmation, Publication
from rondo.weights.bucket import Named, buckets
from rondo.weights.checksum import Checksum
from rondo.weights.shelf import Shelf
from rondo.weights.transport import Transport

UNTAKEN = 2  # offers at once


class Receiver(Protocol):
    """The part of an engine that a publication needs."""

    url: str

    async def health(self) -> None: ...
    async def pause(self) -> None: ...
    async def start_update(self) -> None: ...
    async def update(self, info: Mapping[str, Any]) -> None: ...
    async def finish_update(self) -> Confirmation: ...
    async def reset_prefix_cache(self) -> None: ...
    async def resume(self) -> None: ...


class Submit(Protocol):
    """Starts a coroutine in the loop that the engines' connections live in."""

    def __call__(self, coroutine: Coroutine[Any, Any, Any], /) -> Future[Any]: ...


class Round:
    """One attempt: who still takes part, and who fell out of it for what reason."""

    def __init__(self, receivers: Sequence[Any]) -> None:
        self._receivers = list(enumerate(receivers))
        self.failed: dict[Any, Exception] = {}

    async def all(self, call: Callable[[Any, int], Coroutine[Any, Any, Any]]) -> dict[Any, Any]:
        """Everyone's answer to a call; who fails at it falls out."""
        asked = [(receiver, number) for number, receiver in self._receivers if receiver not in self.failed]
        answers = await asyncio.gather(*(call(*one) for one in asked), return_exceptions=True)
        given = {}
        for (receiver, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, EngineError | PublicationError):
                self.failed.setdefault(receiver, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                given[receiver] = answer
        return given

    def fail_all(self, error: Exception) -> None:
        for _, receiver in self._receivers:
            self.failed.setdefault(receiver, error)


class Publisher:
    def __init__(
        self,
        *,
        transport: Transport,
        weights: Callable[[], Iterator[Named]],
        dtype: torch.dtype,
        bucket_bytes: int,
        receivers: Callable[[], Sequence[Any]],
        submit: Submit,
        probe: Callable[[int, Sequence[Any]], Mapping[Any, Exception] | None],
        on_repeat: Callable[[str], None],
        lane: Lane,
        shelf: Shelf | None = None,
        apart: bool = False,
        on_held: Callable[[Any, Confirmation], None] = lambda receiver, confirmation: None,
        on_failed: Callable[[Any, str], None] = lambda receiver, reason: None,
        probe_one: Callable[[Any], Coroutine[Any, Any, None]] | None = None,
        health_seconds: float = 10.0,
    ) -> None:
        self._transport = transport
        self._weights = weights
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._receivers = receivers
        self._submit = submit
        self._probe = probe
        self._on_repeat = on_repeat
        self._lane = lane
        self._shelf = shelf
        # Weights may be read by another thread until the next step: then the copy is made beside the period's start.
        self._later = shelf if apart and shelf is not None and not shelf.written else None
        self._now = None if self._later is not None else shelf
        self._on_held = on_held  # in the engines' loop
        self._on_failed = on_failed  # in the engines' loop
        self._probe_one = probe_one
        self._health_seconds = health_seconds
        self._feeding: set[asyncio.Task[Any]] = set()  # the loop's own
        self._over: asyncio.Event | None = None  # the loop's own: set when the publication under way is over
        self._full = False  # the last one failed for someone
        self.confirmed: Publication | None = None  # the last that every engine confirmed
        self.bytes = 0  # of the last publication, on their way to each engine

    @property
    def under_way(self) -> bool:
        return self._over is not None

    def publish(self, version: int) -> None:
        """Returns when every engine that lives has confirmed; raises PublicationError when none did that could."""
        with self._lane.doing("publishing"):
            receivers = self._submit(self._open()).result()
            try:
                self._publish(version, receivers)
            finally:
                self._submit(self._close()).result()

    def may_move(self) -> None:
        """Returns when the weights may change: nothing is being copied from them any more."""
        if self._later is not None:
            self._later.wait()

    async def feed(self, receiver: Receiver) -> Confirmation | None:
        """Give a newcomer the last publication; None when a new one came between, and may have taken it along."""
        if self._over is not None:
            await self._over.wait()
            return None
        task = asyncio.ensure_future(self._feed(receiver))
        self._feeding.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._feeding.discard(task)
            task.cancel()
        return None if task.cancelled() else task.result()

    def close(self) -> None:
        self._transport.close()
        if self._shelf is not None:
            self._submit(self._shelf.stop()).result()
            self._shelf.close()

    async def _open(self) -> list[Any]:
        self._over = asyncio.Event()
        fed = list(self._feeding)
        for task in fed:
            task.cancel()
        await asyncio.gather(*fed, return_exceptions=True)
        return list(self._receivers())

    async def _close(self) -> None:
        assert self._over is not None
        self._over.set()
        self._over = None

    def _publish(self, version: int, receivers: Sequence[Any]) -> None:
        held, failed, announced = self._attempt(version, receivers, full=self._full)
        self._full = bool(failed)
        refused: Exception | None = None
        if failed:
            living = self._submit(self._living(failed)).result()
            if living:
                self._on_repeat(f"the publication of version {version} is repeated: {failed[living[0]]}")
                again, failed_again, _ = self._attempt(version, living, full=True)
                held |= again
                failed |= failed_again
                refused = next((one for one in failed_again.values() if not isinstance(one, UnreachableError)), None)
            failed = {receiver: error for receiver, error in failed.items() if receiver not in held}
        if not held and refused is not None:
            raise PublicationError(f"version {version} could not be published: {refused}") from refused
        if not held and self._shelf is None:
            raise PublicationError(
                f"version {version} reached no engine, and there is no copy to feed a new one from: "
                f"{next(iter(failed.values()), 'none is there')}"
            )
        held = self._submit(self._resume(held, failed)).result()
        self.confirmed = Publication(version=version, checksum=announced, engines=len(held))
        lost = self._probe(version, list(held)) or {}
        self._submit(self._settle(held, failed | dict(lost))).result()
        if self._later is not None:
            copied = buckets(self._weights(), dtype=self._dtype, limit=self._bucket_bytes)
            self._later.copy(copied, version=version, checksum=announced)

    def _attempt(
        self, version: int, receivers: Sequence[Any], *, full: bool
    ) -> tuple[dict[Any, Confirmation], dict[Any, Exception], str]:
        """Who confirmed, who did not and why, and the checksum of the whole."""
        round_ = Round(receivers)
        self._transport.begin(version=version, receivers=[receiver.url for receiver in receivers], full=full)
        self._submit(round_.all(lambda receiver, _: _start(receiver))).result()
        announced = self._send(version, round_)
        told = {"version": version, "checksum": announced}
        self._submit(round_.all(lambda receiver, _: receiver.update(told))).result()
        confirmations = self._submit(round_.all(lambda receiver, _: receiver.finish_update())).result()
        for receiver, confirmation in list(confirmations.items()):
            if (confirmation.version, confirmation.checksum) != (version, announced):
                round_.failed[receiver] = _other(confirmation, version, announced)
                del confirmations[receiver]
        if not round_.failed:
            self._transport.confirmed()
        return confirmations, round_.failed, announced

    def _send(self, version: int, round_: Round) -> str:
        """Every bucket to every engine, and onto the shelf; returns the checksum of the whole."""
        total, untaken = Checksum(), deque[Future[Any]]()
        self.bytes = 0
        weights = self._weights()
        if self._now is not None:
            self._now.begin(version)
        try:
            for place, bucket in enumerate(buckets(weights, dtype=self._dtype, limit=self._bucket_bytes)):
                while len(untaken) >= UNTAKEN:
                    untaken.popleft().result()
                offer = self._transport.offer(bucket)
                if offer.deliver is not None and round_.failed:  # those who were told would wait for it
                    round_.fail_all(PublicationError("an engine fell out of the broadcast"))
                untaken.append(self._submit(_offer(round_, {**offer.info, "version": version})))
                untaken[-1].add_done_callback(self._taken(time.monotonic(), place, offer.bytes))
                if offer.deliver is not None and not round_.failed:
                    _deliver(offer.deliver, round_)
                if self._now is not None:
                    self._now.put(bucket)
                for name, tensor in offer.tensors:
                    total.add(name, tensor)
                self.bytes += offer.bytes
            while untaken:
                untaken.popleft().result()
        finally:
            for _ in weights:  # other ranks gather along: they must not be left waiting
                pass
            for future in untaken:
                future.cancel()
        if self._now is not None:
            self._now.seal(total.digest())
        return total.digest()

    def _taken(self, offered: float, number: int, size: int) -> Callable[[Future[Any]], None]:
        return lambda _: self._lane.mark("bucket", offered, time.monotonic(), number, size)

    async def _living(self, failed: Mapping[Any, Exception]) -> list[Any]:
        """Those of the failed that give a sign of life: worth a second attempt."""
        signs = await asyncio.gather(
            *(asyncio.wait_for(receiver.health(), self._health_seconds) for receiver in failed), return_exceptions=True
        )
        return [receiver for receiver, sign in zip(failed, signs, strict=True) if sign is None]

    async def _resume(self, held: dict[Any, Confirmation], failed: dict[Any, Exception]) -> dict[Any, Confirmation]:
        round_ = Round(list(held))
        await round_.all(lambda receiver, _: receiver.reset_prefix_cache())
        await round_.all(lambda receiver, _: receiver.resume())
        failed |= round_.failed
        return {receiver: confirmation for receiver, confirmation in held.items() if receiver not in round_.failed}

    async def _settle(self, held: Mapping[Any, Confirmation], failed: Mapping[Any, Exception]) -> None:
        for receiver, confirmation in held.items():
            if receiver not in failed:
                self._on_held(receiver, confirmation)
        for receiver, error in failed.items():
            self._on_failed(receiver, str(error))

    async def _feed(self, receiver: Receiver) -> Confirmation:
        if self._later is not None:
            await asyncio.to_thread(self._later.wait)
        if self._shelf is None or self._shelf.kept is None:
            raise PublicationError("no publication is kept: the next one will take it along")
        kept = self._shelf.kept
        await _start(receiver)
        for info in await self._shelf.infos(receiver.url):
            await receiver.update(info)
        confirmation = await receiver.finish_update()
        if (confirmation.version, confirmation.checksum) != (kept.version, kept.checksum):
            raise _other(confirmation, kept.version, kept.checksum)
        await receiver.reset_prefix_cache()
        await receiver.resume()
        if self._probe_one is not None:
            await self._probe_one(receiver)
        return confirmation


def _other(confirmation: Confirmation, version: int, announced: str) -> PublicationError:
    return PublicationError(
        f"engine {confirmation.engine} holds version {confirmation.version} with checksum "
        f"{confirmation.checksum} instead of version {version} with {announced}"
    )


def _deliver(deliver: Callable[[], None], round_: Round) -> None:
    """A broadcast that one engine misses fails for all."""
    try:
        deliver()
    except PublicationError as error:
        round_.fail_all(error)


async def _start(receiver: Receiver) -> None:
    await receiver.pause()
    await receiver.start_update()


async def _offer(round_: Round, info: Mapping[str, Any]) -> None:
    await round_.all(lambda receiver, number: receiver.update({**info, "receiver": number}))
