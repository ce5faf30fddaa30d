"""Weights through device memory that two processes share: a bucket is written once, and the engine reads it there.

Two buffers take turns; each is exported once, and its handle travels as JSON (vLLM's own engine sends pickles). Sender
and receiver must be processes of one host.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rondo.errors import PublicationError
from rondo.weights.bucket import Bucket, Named
from rondo.weights.transport import Offer, described


class IpcTransport:
    name = "ipc"

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[int, tuple[torch.Tensor, list[Any]]] = {}  # with their handles

    def begin(self, *, version: int, receivers: Sequence[str], full: bool) -> None:
        pass

    def offer(self, bucket: Bucket) -> Offer:
        count = sum(tensor.numel() for _, tensor in bucket.tensors)
        buffer, handle = self._buffer(bucket.number % 2, count)
        views, offset = [], 0
        with torch.no_grad():
            for name, tensor in bucket.tensors:
                view = buffer[offset : offset + tensor.numel()].view(tensor.shape)
                view.copy_(tensor)
                views.append((name, view))
                offset += tensor.numel()
        torch.accelerator.current_stream(self._device).synchronize()
        info = {"transport": self.name, "handle": handle, "tensors": described(bucket.tensors, self._dtype)}
        return Offer(info=info, tensors=tuple(views), bytes=count * self._dtype.itemsize)

    def confirmed(self) -> None:
        pass

    def close(self) -> None:
        self._buffers.clear()

    def _buffer(self, number: int, count: int) -> tuple[torch.Tensor, list[Any]]:
        held = self._buffers.get(number)
        if held is None or held[0].numel() < count:
            buffer = torch.empty(count, dtype=self._dtype, device=self._device)
            held = self._buffers[number] = (buffer, export(buffer))
        return held


def export(buffer: torch.Tensor) -> list[Any]:
    """What another process needs to see this memory, in words that JSON has."""
    return [
        base64.b64encode(field).decode() if isinstance(field, bytes) else field
        for field in buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    ]


class SharedBuffers:
    """The receiver's half: opens each handle once."""

    def __init__(self) -> None:
        self._open: dict[str, torch.Tensor] = {}

    def tensors(self, info: Mapping[str, Any]) -> Iterator[Named]:
        flat = self._flat(info["handle"])
        offset = 0
        for name, dtype, shape in info["tensors"]:
            kind = getattr(torch, dtype)
            size = kind.itemsize * torch.Size(shape).numel()
            yield name, flat[offset : offset + size].view(kind).view(shape)
            offset += size
        torch.accelerator.current_stream(flat.device).synchronize()  # the sender may write again after our answer

    def _flat(self, handle: Sequence[Any]) -> torch.Tensor:
        key = str(handle)
        if key not in self._open:
            if not torch.accelerator.is_available():
                raise PublicationError("weights.transport = ipc, but this engine runs on no accelerator: use files")
            device, memory, size, offset, counter, counter_offset, event, sync = handle
            torch.accelerator.current_stream()  # makes sure that the device is up
            storage = torch.UntypedStorage._new_shared_cuda(
                device, _bytes(memory), size, offset, _bytes(counter), counter_offset, _bytes(event), sync
            )
            self._open[key] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._open[key]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
