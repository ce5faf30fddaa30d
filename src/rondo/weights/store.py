"""Publications on this host: buckets as safetensors files that are mapped once and written again and again.

Two generations take turns, so that the last publication stays whole until the next one is confirmed. Fresh memory is
slow to touch (seconds per GB), and a file that is written in place needs none. A half-written file is never taken for
a whole one: an engine confirms the checksum of all that it read.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rondo.errors import PublicationError
from rondo.storage import sync
from rondo.weights.bucket import Bucket, Named
from rondo.weights.folder import SHARED_MEMORY, make_publication_folder, remove_publication_folder

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


@dataclass(frozen=True, kw_only=True)
class Stored:
    path: Path
    tensors: tuple[Named, ...]  # views of the mapped file
    bytes: int


class Store:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self._dtype = dtype
        self._mapped: dict[Path, tuple[bytes, Stored]] = {}
        self._staging = torch.empty(0, dtype=dtype)
        self._flush = SHARED_MEMORY not in folder.parents
        make_publication_folder(folder)

    def put(self, bucket: Bucket, *, version: int) -> Stored:
        """The bucket in the published dtype, in the file of this version's generation."""
        stored = self._open(bucket, version)
        with torch.no_grad():
            for (_, target), (_, source) in zip(stored.tensors, self._here(bucket), strict=True):
                target.copy_(source)  # casts and writes in one pass
        if self._flush:
            sync(stored.path)
        return stored

    def held(self, bucket: Bucket, *, version: int) -> Stored:
        """What `put` has written."""
        return self._mapped[self._path(bucket, version)][1]

    def last(self, bucket: Bucket, *, version: int) -> Stored | None:
        """The same bucket of the publication before `version`, if it was made here."""
        held = self._mapped.get(self._path(bucket, version - 1))
        return held[1] if held else None

    def close(self) -> None:
        self._mapped.clear()
        remove_publication_folder(self.folder)

    def _here(self, bucket: Bucket) -> Sequence[Named]:
        """The bucket on the host: a device's by way of page-locked memory, which it can write at full speed."""
        device = bucket.tensors[0][1].device
        if device.type == "cpu":
            return bucket.tensors
        count = sum(tensor.numel() for _, tensor in bucket.tensors)
        if self._staging.numel() < count:
            self._staging = torch.empty(count, dtype=self._dtype, pin_memory=True)
        views, offset = [], 0
        for name, tensor in bucket.tensors:
            view = self._staging[offset : offset + tensor.numel()].view(tensor.shape)
            views.append((name, view.copy_(tensor, non_blocking=True)))
            offset += tensor.numel()
        torch.accelerator.current_stream(device).synchronize()
        return views

    def _path(self, bucket: Bucket, version: int) -> Path:
        return self.folder / f"{'even' if version % 2 == 0 else 'odd'}-{bucket.number:04d}.safetensors"

    def _open(self, bucket: Bucket, version: int) -> Stored:
        path, header = self._path(bucket, version), _header(bucket, self._dtype)
        held = self._mapped.get(path)
        if held is None or held[0] != header:
            held = self._mapped[path] = (header, _create(path, header, bucket, self._dtype))
        return held[1]


def _header(bucket: Bucket, dtype: torch.dtype) -> bytes:
    """A safetensors header for the bucket's tensors, in their order."""
    entries, offset = {}, 0
    for name, tensor in bucket.tensors:
        end = offset + tensor.numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return struct.pack("<Q", len(text)) + text


def _create(path: Path, header: bytes, bucket: Bucket, dtype: torch.dtype) -> Stored:
    size = sum(tensor.numel() for _, tensor in bucket.tensors) * dtype.itemsize
    path.unlink(missing_ok=True)
    with path.open("x+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, len(header) + size)  # a full disk says so here, not by a signal later
        except OSError as error:
            path.unlink()
            free = shutil.disk_usage(path.parent).free / 1e9
            raise PublicationError(
                f"weights of {size / 1e9:.2f} GB do not fit into {path.parent} ({error.strerror}; {free:.2f} GB are "
                "free there): make room or set weights.folder"
            ) from error
        mapping = mmap.mmap(file.fileno(), len(header) + size)
    mapping[: len(header)] = header
    data = torch.frombuffer(mapping, dtype=dtype, offset=len(header)) if size else torch.empty(0, dtype=dtype)
    views, offset = [], 0
    for name, tensor in bucket.tensors:
        views.append((name, data[offset : offset + tensor.numel()].view(tensor.shape)))
        offset += tensor.numel()
    return Stored(path=path, tensors=tuple(views), bytes=size)
