"""The ordering contract of a publication, in one place.

    1. every engine pauses; nothing is generated from here on
    2. buckets of weights leave as they are gathered: an engine loads one while the next is on its way
    3. every engine is told the checksum of the whole, takes the version if what it holds has it, and confirms
    4. every engine drops its cached prefixes (a prompt cached under old weights is a silent off-policy error)
    5. every engine resumes, and not before all have confirmed
    6. every engine's log-probs of a probe text are those of the trainer (a checksum does not see what is computed with)

What goes wrong in 1 to 3 is said and the whole repeated once, in full; then it is an error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from rondo.errors import EngineError, PublicationError
from rondo.observe.lane import Lane
from rondo.types import Confirmation, Publication
from rondo.weights.bucket import Named, buckets
from rondo.weights.checksum import Checksum
from rondo.weights.transport import Transport

UNTAKEN = 2  # offers at once


class Receiver(Protocol):
    """The part of an engine that a publication needs."""

    url: str

    async def pause(self) -> None: ...
    async def start_update(self) -> None: ...
    async def update(self, info: Mapping[str, Any]) -> None: ...
    async def finish_update(self) -> Confirmation: ...
    async def reset_prefix_cache(self) -> None: ...
    async def resume(self) -> None: ...


class Submit(Protocol):
    """Starts a coroutine in the loop that the engines' connections live in."""

    def __call__(self, coroutine: Coroutine[Any, Any, Any], /) -> Future[Any]: ...


class Publisher:
    def __init__(
        self,
        *,
        transport: Transport,
        weights: Callable[[], Iterator[Named]],
        dtype: torch.dtype,
        bucket_bytes: int,
        receivers: Callable[[], Sequence[Receiver]],
        submit: Submit,
        probe: Callable[[int, Sequence[Any]], None],
        on_repeat: Callable[[str], None],
        lane: Lane,
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
        self.confirmed: Publication | None = None  # the last that every engine confirmed
        self.bytes = 0  # of the last publication, on their way to each engine

    def publish(self, version: int) -> None:
        """Returns when every engine has confirmed; raises PublicationError when one has not."""
        receivers = self._receivers()
        with self._lane.doing("publishing"):
            try:
                self._publish(version, receivers, full=False)
            except (EngineError, PublicationError) as error:
                self._on_repeat(f"the publication of version {version} is repeated: {error}")
                try:
                    self._publish(version, receivers, full=True)
                except EngineError as again:
                    raise PublicationError(f"version {version} could not be published: {again}") from again
            self._probe(version, receivers)

    def close(self) -> None:
        self._transport.close()

    def _publish(self, version: int, receivers: Sequence[Receiver], *, full: bool) -> None:
        self._transport.begin(version=version, receivers=[receiver.url for receiver in receivers], full=full)
        self._all(receivers, _open)
        announced = self._send(version, receivers)
        self._all(receivers, lambda receiver: receiver.update({"version": version, "checksum": announced}))
        for confirmation in self._all(receivers, lambda receiver: receiver.finish_update()):
            if (confirmation.version, confirmation.checksum) != (version, announced):
                raise PublicationError(
                    f"engine {confirmation.engine} holds version {confirmation.version} with checksum "
                    f"{confirmation.checksum} instead of version {version} with {announced}"
                )
        self._transport.confirmed()
        self._all(receivers, lambda receiver: receiver.reset_prefix_cache())
        self.confirmed = Publication(version=version, checksum=announced, engines=len(receivers))
        self._all(receivers, lambda receiver: receiver.resume())

    def _send(self, version: int, receivers: Sequence[Receiver]) -> str:
        """Every bucket to every engine; returns the checksum of the whole."""
        total, untaken = Checksum(), deque[Future[Any]]()
        self.bytes = 0
        weights = self._weights()
        try:
            for place, bucket in enumerate(buckets(weights, dtype=self._dtype, limit=self._bucket_bytes)):
                while len(untaken) >= UNTAKEN:
                    untaken.popleft().result()
                offer = self._transport.offer(bucket)
                told = [{**offer.info, "version": version, "receiver": number} for number in range(len(receivers))]
                untaken.append(self._submit(_gather(receivers, told)))
                untaken[-1].add_done_callback(self._taken(time.monotonic(), place, offer.bytes))
                if offer.deliver is not None:
                    offer.deliver()
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
        return total.digest()

    def _taken(self, offered: float, number: int, size: int) -> Callable[[Future[Any]], None]:
        return lambda _: self._lane.mark("bucket", offered, time.monotonic(), number, size)

    def _all(self, receivers: Sequence[Receiver], call: Callable[[Receiver], Coroutine[Any, Any, Any]]) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*(call(receiver) for receiver in receivers))

        result: list[Any] = self._submit(together()).result()
        return result


async def _open(receiver: Receiver) -> None:
    await receiver.pause()
    await receiver.start_update()


async def _gather(receivers: Sequence[Receiver], told: Sequence[Mapping[str, Any]]) -> None:
    await asyncio.gather(*(receiver.update(info) for receiver, info in zip(receivers, told, strict=True)))
