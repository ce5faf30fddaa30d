"""The last publication, kept on this host: joiners and restarted engines are fed from it, never from the live trainer.

Transports that write files to a Store have it already; for those that do not (device memory, a broadcast) every bucket
is written here too: by a thread, once the engines have theirs and until the trainer's next step moves the weights, or,
where weights must be gathered from several ranks, while the engines take it. An engine on this host maps the files;
one elsewhere is given them over HTTP, by a server that is started when the first such engine comes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from rondo.weights.bucket import Bucket
from rondo.weights.store import Store

Address = Callable[[Path], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A whole publication: what a Receiver must be told to take it."""

    version: int
    checksum: str
    files: tuple[tuple[Path, tuple[str, ...]], ...]  # with the names of their tensors, in the publication's order


class Shelf:
    def __init__(
        self,
        store: Store,
        *,
        written: bool,
        keep: bool = False,
        elsewhere: Callable[[str], Coroutine[Any, Any, Address | None]],
        on_close: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._store = store
        self.written = written  # by the transport itself
        self._keep = keep  # engines hold on to a copy, for the changes that the next publication sends
        self._elsewhere = elsewhere  # how an engine at this URL gets files; None: it is on this host, or shares a disk
        self._on_close = on_close
        self._files: list[tuple[Path, tuple[str, ...]]] = []
        self._version = -1
        self._copying: Future[None] | None = None
        self.kept: Kept | None = None

    def begin(self, version: int) -> None:
        self._version, self._files = version, []

    def put(self, bucket: Bucket) -> None:
        if self.written:
            stored = self._store.held(bucket, version=self._version)
        else:
            stored = self._store.put(bucket, version=self._version)
        self._files.append((stored.path, tuple(name for name, _ in stored.tensors)))

    def seal(self, checksum: str) -> None:
        """All of it was put; the publication before it may be overwritten from here on."""
        self.kept = Kept(version=self._version, checksum=checksum, files=tuple(self._files))

    def copy(self, buckets: Iterator[Bucket], *, version: int, checksum: str) -> None:
        """Put and seal all of it in a thread of its own; `wait` before the weights move."""
        self._copying = Future()
        Thread(target=self._copy, args=(self._copying, buckets, version, checksum), name="shelf", daemon=True).start()

    def wait(self) -> None:
        """Until the copy is whole; raises what it failed of."""
        if self._copying is not None:
            self._copying.result()

    def _copy(self, done: Future[None], buckets: Iterator[Bucket], version: int, checksum: str) -> None:
        try:
            if torch.accelerator.is_available():  # beside what the trainer has queued, not behind it
                torch.accelerator.set_stream(torch.Stream())
            self.begin(version)
            for bucket in buckets:
                self.put(bucket)
            self.seal(checksum)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    async def infos(self, url: str) -> Sequence[Mapping[str, Any]]:
        """What the engine at `url` is told, one after the other, to take what is kept."""
        assert self.kept is not None
        address = await self._elsewhere(url)
        told: list[Mapping[str, Any]] = []
        for path, names in self.kept.files:
            place = {"transport": "http", **address(path)} if address else {"transport": "files", "path": str(path)}
            told.append({**place, "tensors": list(names), "keep": self._keep, "version": self.kept.version})
        return [*told, {"version": self.kept.version, "checksum": self.kept.checksum}]

    async def stop(self) -> None:
        """In the engines' loop: no file is served any more."""
        await self._on_close()

    def close(self) -> None:
        if not self.written:
            self._store.close()
