"""The engine's half of a publication: what it was told, turned into named tensors, whichever way they come.

Imports torch only: it runs inside vLLM's workers too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rondo.errors import PublicationError
from rondo.weights.broadcast import Listener
from rondo.weights.bucket import Named
from rondo.weights.delta import apply, from_parts
from rondo.weights.download import download
from rondo.weights.folder import SHARED_MEMORY
from rondo.weights.ipc import SharedBuffers
from rondo.weights.safe import UnreadableWeightsError, map_file, parse


class Receiver:
    """One engine worker's. Keeps what makes the next publication cheaper: mapped files, opened buffers, and, where
    deltas are announced, a copy of the last publication."""

    def __init__(self, *, device: torch.device | None = None, worker: int = 0) -> None:
        self._device = device or torch.device("cpu")
        self._listener = Listener(worker=worker)
        self._shared = SharedBuffers()
        self._mapped: dict[Path, tuple[tuple[int, int], dict[str, torch.Tensor]]] = {}
        self._held: dict[str, torch.Tensor] = {}
        self._held_version: int | None = None  # None while it is being changed, or if that was left unfinished
        self._base: int | None = None

    def begin(self) -> None:
        self._base, self._held_version = self._held_version, None

    def receive(self, info: Mapping[str, Any]) -> Iterator[Named]:
        """The tensors of one bucket, in the order of the publication."""
        try:
            match info.get("transport"):
                case "files":
                    yield from self._ordered(self._map(Path(info["path"]), once="base" in info), info)
                case "http":
                    yield from self._ordered(
                        parse(download(info["url"], token=str(info.get("token", ""))), source=info["url"]), info
                    )
                case "ipc":
                    yield from self._shared.tensors(info)
                case "nccl":
                    yield from self._listener.tensors(info, self._device)
                case other:
                    raise PublicationError(f"transport = {other!r} is none that this engine takes")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableWeightsError(f"update_info for transport {info.get('transport')}: {error!r}") from error

    def sealed(self, version: int) -> None:
        """All that was received is whole, and is this version."""
        self._held_version = version if self._held else None

    def _map(self, path: Path, *, once: bool) -> dict[str, torch.Tensor]:
        """A file in shared memory stays mapped: it is written again in place."""
        if once or SHARED_MEMORY not in path.parents:
            return map_file(path)
        try:
            stat = path.stat()
        except OSError as error:
            raise UnreadableWeightsError(f"weights cannot be read from {path}: {error.strerror}") from error
        key = (stat.st_ino, stat.st_size)
        held = self._mapped.get(path)
        if held is None or held[0] != key:
            held = self._mapped[path] = (key, map_file(path))
        return held[1]

    def _ordered(self, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> Iterator[Named]:
        base = info.get("base")
        if base is not None and base != self._base:
            raise PublicationError(f"changes since version {base} were sent, but this engine holds {self._base}")
        for name in info.get("tensors", tensors):  # the file's own order, unless told
            if name in tensors:
                tensor = tensors[name]
                if info.get("keep"):
                    tensor = self._keep(name, tensor)
            else:
                tensor = self._held[name]
                apply(from_parts(name, tensors), tensor)
            yield name, tensor

    def _keep(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = self._held[name] = torch.empty_like(tensor)
        return held.copy_(tensor)
