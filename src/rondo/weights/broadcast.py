"""Weights as a broadcast in packed buckets: from one device to many, across hosts (`nccl`; gloo between CPUs).

Sender and engines form a process group of their own beside the trainer's, from a store that the sender opens: the
sender is rank 0, worker j of engine i is rank 1 + i * workers + j. It is formed anew when the set of engines changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rondo.errors import PublicationError
from rondo.weights.bucket import Bucket, Named
from rondo.weights.transport import Offer, described

PATIENCE = timedelta(seconds=120)  # an engine that was told takes part, or is gone
_GROUPS = {"cpu": "ProcessGroupGloo", "cuda": "ProcessGroupNCCL"}


class BroadcastTransport:
    name = "nccl"

    def __init__(self, *, dtype: torch.dtype, device: torch.device, host: str, workers: int = 1) -> None:
        self._dtype = dtype
        self._device = device
        self._host = host
        self._workers = workers  # per engine
        self._receivers: tuple[str, ...] = ()
        self._store: TCPStore | None = None
        self._group: Any = None
        self._buffers: dict[int, torch.Tensor] = {}

    def begin(self, *, version: int, receivers: Sequence[str], full: bool) -> None:
        if tuple(receivers) != self._receivers or full:
            self._receivers, self._group = tuple(receivers), None
            size = 1 + len(receivers) * self._workers
            self._store = TCPStore(self._host, 0, size, True, PATIENCE, wait_for_workers=False)

    def offer(self, bucket: Bucket) -> Offer:
        flat = self._pack(bucket)
        views, offset = [], 0
        for name, tensor in bucket.tensors:
            views.append((name, flat[offset : offset + tensor.numel()].view(tensor.shape)))
            offset += tensor.numel()
        assert self._store is not None
        info = {
            "transport": self.name,
            "meeting": [self._host, self._store.port, 1 + len(self._receivers) * self._workers],
            "workers": self._workers,
            "tensors": described(bucket.tensors, self._dtype),
        }
        return Offer(
            info=info, tensors=tuple(views), bytes=flat.numel() * flat.itemsize, deliver=lambda: self._send(flat)
        )

    def confirmed(self) -> None:
        pass

    def close(self) -> None:
        self._group = self._store = None

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        count = sum(tensor.numel() for _, tensor in bucket.tensors)
        held = self._buffers.get(bucket.number % 2)
        if held is None or held.numel() < count:
            held = self._buffers[bucket.number % 2] = torch.empty(count, dtype=self._dtype, device=self._device)
        offset = 0
        with torch.no_grad():
            for _, tensor in bucket.tensors:
                held[offset : offset + tensor.numel()].copy_(tensor.reshape(-1))
                offset += tensor.numel()
        return held[:count]

    def _send(self, flat: torch.Tensor) -> None:
        if self._group is None:
            size = 1 + len(self._receivers) * self._workers
            self._group = _group(self._device, self._store, 0, size)
        try:
            _broadcast(self._group, flat)
        except RuntimeError as error:  # torch's own; a peer is gone
            self._receivers = ()  # a group that has failed is of no more use
            raise PublicationError(f"the broadcast failed: {str(error).splitlines()[0]}") from error


class Listener:
    """The receiver's half: joins a group once, then takes part in its broadcasts."""

    def __init__(self, *, worker: int = 0) -> None:
        self._worker = worker  # among its engine's
        self._meeting: list[Any] = []
        self._group: Any = None

    def tensors(self, info: Mapping[str, Any], device: torch.device) -> Iterator[Named]:
        if info["meeting"] != self._meeting:
            host, port, size = self._meeting = info["meeting"]
            rank = 1 + info["receiver"] * info["workers"] + self._worker
            store = TCPStore(host, port, size, False, PATIENCE, wait_for_workers=False)
            self._group = _group(device, store, rank, size)
        kind = getattr(torch, info["tensors"][0][1])
        flat = torch.empty(sum(torch.Size(shape).numel() for _, _, shape in info["tensors"]), dtype=kind, device=device)
        _broadcast(self._group, flat)
        offset = 0
        for name, _, shape in info["tensors"]:
            count = torch.Size(shape).numel()
            yield name, flat[offset : offset + count].view(shape)
            offset += count


def _group(device: torch.device, store: Any, rank: int, size: int) -> Any:
    """A process group that leaves the process's own (the trainer's ranks, vLLM's workers) alone."""
    name = _GROUPS.get(device.type)
    if name is None or not hasattr(dist, name):
        raise PublicationError(
            f"weights.transport = nccl has no broadcast for devices of type {device.type} here: use files or http"
        )
    kind: Any = getattr(dist, name)
    if name == "ProcessGroupGloo":
        return kind(store, rank, size, PATIENCE)
    return kind(store, rank, size)


def _broadcast(group: Any, flat: torch.Tensor) -> None:
    group.broadcast([flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
    if flat.device.type != "cpu":
        torch.accelerator.current_stream(flat.device).synchronize()
