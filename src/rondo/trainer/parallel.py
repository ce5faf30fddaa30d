"""Many ranks: how they talk, and how a model is sharded over them.

All talk of ours goes over one CPU process group: JSON in byte tensors (never a pickle) and sums of integers. A rank
waits there as long as it takes: whoever started the ranks ends them all when one dies. The device's own backend
carries only what FSDP2 does inside a micro-step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

PATIENCE = timedelta(days=365)  # a wait for data has no limit of its own


class Ranks(Protocol):
    """One rank's view of all of them. Records are what JSON can hold."""

    rank: int
    size: int

    def exchange(self, record: Any) -> list[Any]:
        """Every rank's record, in rank order, on every rank."""

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor by its sum over all ranks. Integers only: their sum has no order."""


class Alone:
    """The only rank: no process group, no talk."""

    rank = 0
    size = 1

    def exchange(self, record: Any) -> list[Any]:
        return [record]

    def add_up(self, tensor: torch.Tensor) -> None:
        pass


class Joined:
    """One of several ranks, after `torch.distributed.init_process_group`."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.cpu = dist.new_group(backend="gloo", timeout=PATIENCE)

    def exchange(self, record: Any) -> list[Any]:
        own = _bytes(record)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([own.numel()]), group=self.cpu)
        longest = max(int(length) for length in lengths)
        padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(padded, torch.nn.functional.pad(own, (0, longest - own.numel())), group=self.cpu)
        return [_record(row[: int(length)]) for row, length in zip(padded, lengths, strict=True)]

    def add_up(self, tensor: torch.Tensor) -> None:
        assert not tensor.is_floating_point()
        held = tensor.cpu()
        dist.all_reduce(held, group=self.cpu)
        if held is not tensor:
            tensor.copy_(held)

    def tell(self, records: Sequence[Any]) -> None:
        """From rank 0: the i-th record to rank i + 1. Returns when all have it."""
        messages = [_bytes(record) for record in records]
        sends = []
        for rank, message in enumerate(messages, start=1):
            sends.append(dist.isend(torch.tensor([message.numel()]), dst=rank, group=self.cpu))
            sends.append(dist.isend(message, dst=rank, group=self.cpu))
        for send in sends:
            assert send is not None
            send.wait()

    def hear(self) -> Any:
        """The next record from rank 0, however long it takes."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, src=0, group=self.cpu)
        message = torch.zeros(int(length), dtype=torch.uint8)
        dist.recv(message, src=0, group=self.cpu)
        return _record(message)

    def send(self, tensor: torch.Tensor, *, to: int) -> None:
        dist.send(tensor, dst=to, group=self.cpu)

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Fills the tensor, which has the size of what comes."""
        dist.recv(tensor, src=source, group=self.cpu)


def leave(code: int) -> NoReturn:
    """End a process that had a process group. Python's own way out destroys objects that gloo's threads still use, and
    now and then aborts (seen with torch 2.13)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_mesh(device: torch.device, size: int, shard: int) -> DeviceMesh:
    """All ranks hold one copy among them (shard = 0), or every `shard` neighbours hold one."""
    if shard in (0, size):
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    assert size % shard == 0, (size, shard)
    return init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))


def shard_model(
    root: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    offloaded: bool = False,
) -> None:
    """FSDP2 over each decoder layer and the rest. Gradients are summed, not averaged, and in float32 at least.

    Computes in `dtype`, whatever the shards are. What is never trained is freed after its forward even at the root:
    nothing else would, and it would go stale there.
    """
    trained = [parameter.dtype for parameter in root.parameters() if parameter.requires_grad]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.promote_types(trained[0], torch.float32) if trained else None
    )
    pin = torch.accelerator.is_available()
    home = CPUOffloadPolicy(pin_memory=pin) if offloaded else OffloadPolicy()
    for module in (*layers, root):
        reshard = module is not root or not trained
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=home, reshard_after_forward=reshard)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this rank may hold a shard; every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(record: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)


def _record(message: torch.Tensor) -> Any:
    return json.loads(message.numpy().tobytes())
