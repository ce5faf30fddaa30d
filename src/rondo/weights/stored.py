"""Weights as files: in shared memory or on a shared disk (`files`), or fetched over HTTP (`http`).

Both offer the files of a Store on this host; with `delta` an engine that holds the last publication is sent only what
changed since, unless that is no smaller.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rondo.weights.bucket import Bucket
from rondo.weights.delta import difference, named_parts
from rondo.weights.folder import make_publication_folder, remove_publication_folder
from rondo.weights.store import Store, Stored
from rondo.weights.transport import Offer


class StoredTransport:
    def __init__(
        self,
        *,
        name: str,
        store: Store,
        outbox: Path | None = None,
        delta: bool = False,
        address: Callable[[Path], Mapping[str, Any]] = lambda path: {"path": str(path)},
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.store = store
        self._outbox = outbox or store.folder  # where engines read
        self._delta = delta
        self._address = address
        self._on_close = on_close
        self._version = -1
        self._full = True
        self._confirmed: int | None = None
        self._known: frozenset[str] = frozenset()  # engines that confirmed it
        self._receivers: frozenset[str] = frozenset()
        if self._outbox != store.folder:
            make_publication_folder(self._outbox)

    def begin(self, *, version: int, receivers: Sequence[str], full: bool) -> None:
        self._version = version
        follows = self._confirmed == version - 1 and self._known.issuperset(receivers)
        self._full = full or not self._delta or not follows
        self._receivers = frozenset(receivers)

    def offer(self, bucket: Bucket) -> Offer:
        stored = self.store.put(bucket, version=self._version)
        info: dict[str, Any] = {"transport": self.name, "tensors": [name for name, _ in stored.tensors]}
        if self._delta:
            info["keep"] = True
        path, size = stored.path, stored.bytes
        last = None if self._full else self.store.last(bucket, version=self._version)
        if last is not None:
            path, size = self._write_changes(bucket, stored, last)
            info["base"] = self._version - 1
        elif self._outbox != self.store.folder:
            path = self._outbox / path.name
            shutil.copyfile(stored.path, path)
        return Offer(info={**info, **self._address(path)}, tensors=stored.tensors, bytes=size)

    def confirmed(self) -> None:
        self._confirmed, self._known = self._version, self._receivers

    def close(self) -> None:
        self._on_close()
        self.store.close()
        remove_publication_folder(self._outbox)

    def _write_changes(self, bucket: Bucket, stored: Stored, last: Stored) -> tuple[Path, int]:
        parts: dict[str, torch.Tensor] = {}
        for (name, new), (_, old) in zip(stored.tensors, last.tensors, strict=True):
            changes = difference(new, old)
            if changes.bytes < new.numel() * new.element_size():
                parts |= named_parts(name, changes)
            else:
                parts[name] = new
        path = self._outbox / f"delta-{self._version % 2}-{bucket.number:04d}.safetensors"
        path.unlink(missing_ok=True)  # an engine may still have the old one mapped
        save_file(parts, path)
        return path, sum(part.numel() * part.element_size() for part in parts.values())
