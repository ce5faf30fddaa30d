"""The ordering contract of a publication, in one place.

    1. every engine pauses; nothing is generated from here on
    2. the weights are written once, with version and checksum
    3. every engine loads them and confirms version and checksum
    4. every engine drops its cached prefixes (a prompt cached under old weights is a silent off-policy error)
    5. every engine resumes, and not before all have confirmed

The last publication is kept until the next one is confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rondo.errors import PublicationError
from rondo.observe.lane import Lane
from rondo.types import Confirmation, Publication
from rondo.weights.checksum import checksum
from rondo.weights.files import write_weights
from rondo.weights.folder import make_publication_folder, remove_publication_folder


class Receiver(Protocol):
    """The part of an engine that a publication needs."""

    url: str

    async def pause(self) -> None: ...
    async def load_weights(self, *, path: str, version: int, checksum: str) -> Confirmation: ...
    async def reset_prefix_cache(self) -> None: ...
    async def resume(self) -> None: ...


class Publisher:
    def __init__(
        self,
        *,
        folder: Path,
        weights: Callable[[], dict[str, torch.Tensor]],
        receivers: Callable[[], Sequence[Receiver]],
        call: Callable[[Coroutine[Any, Any, None]], None],
        lane: Lane,
    ) -> None:
        self._folder = folder
        self._weights = weights
        self._receivers = receivers
        self._call = call
        self._lane = lane
        self._last: Path | None = None
        self.confirmed: Publication | None = None  # the last that every engine confirmed
        make_publication_folder(folder)

    def publish(self, version: int) -> None:
        """Returns when every engine has confirmed; raises PublicationError when one has not."""
        with self._lane.doing("publishing"):
            self._call(self._publish(version, self._weights(), self._receivers()))

    async def _publish(self, version: int, tensors: dict[str, torch.Tensor], receivers: Sequence[Receiver]) -> None:
        await asyncio.gather(*(receiver.pause() for receiver in receivers))
        announced = checksum(tensors.items())
        path = write_weights(self._folder, version, tensors)
        confirmations = await asyncio.gather(
            *(receiver.load_weights(path=str(path), version=version, checksum=announced) for receiver in receivers)
        )
        for confirmation in confirmations:
            if (confirmation.version, confirmation.checksum) != (version, announced):
                raise PublicationError(
                    f"engine {confirmation.engine} holds version {confirmation.version} with checksum "
                    f"{confirmation.checksum} instead of version {version} with {announced}"
                )
        await asyncio.gather(*(receiver.reset_prefix_cache() for receiver in receivers))
        self.confirmed = Publication(version=version, checksum=announced, engines=len(confirmations))
        await asyncio.gather(*(receiver.resume() for receiver in receivers))
        if self._last is not None and self._last != path:
            self._last.unlink(missing_ok=True)
        self._last = path

    def close(self) -> None:
        remove_publication_folder(self._folder)
