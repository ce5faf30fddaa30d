"""A hash of named tensors that no sharding can change.

Every element's raw word is summed with its place in the whole tensor as weight, in 64-bit arithmetic that wraps.
Integer sums have no order: each rank adds up what it holds, one small sum over ranks makes them whole, and nothing is
gathered. The sums, names, types and shapes are then hashed together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from rondo.trainer.parallel import Ranks

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # words weighted at once: what is multiplied stays in the cache


def fingerprint(named: Sequence[tuple[str, torch.Tensor]], ranks: Ranks) -> str:
    """One hexadecimal word; called on every rank, the same on all."""
    sums = torch.stack([_own_sum(tensor, ranks) for _, tensor in named]).cpu()
    if ranks.size > 1:
        ranks.add_up(sums)
    digest = hashlib.sha256()
    for (name, tensor), total in zip(named, sums.tolist(), strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode())
    return digest.hexdigest()[:16]


def _own_sum(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Of the part that this rank answers for: its shard, or with copies the first one's."""
    if not isinstance(tensor, DTensor):
        held = tensor.detach()
        return _weighted(held, 0) if ranks.rank == 0 else torch.zeros((), dtype=torch.int64, device=held.device)
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    coordinates, start, rows = mesh.get_coordinate(), 0, tensor.shape[0] if tensor.dim() else 1
    assert coordinates is not None
    for place, size, placement in zip(coordinates, mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            if place:
                return torch.zeros((), dtype=torch.int64, device=local.device)
            continue
        assert isinstance(placement, Shard), placement
        assert placement.dim == 0, placement  # what FSDP2 does: whole rows, so a shard is one stretch of the tensor
        share = -(-rows // size)
        start = min(place * share, rows)
    return _weighted(local, start * (tensor.numel() // max(1, rows)))


def _weighted(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """The sum over elements i of word_i * (2 (start + i) + 1): odd weights are invertible modulo 2^64, so no single
    changed word goes unseen."""
    words = tensor.contiguous().reshape(-1).view(_WORD[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(min(_CHUNK, words.numel()), device=tensor.device) * 2 + 1
    for cursor in range(0, words.numel(), _CHUNK):
        chunk = words[cursor : cursor + _CHUNK]
        total += (chunk * weights[: chunk.numel()]).sum() + chunk.sum() * (2 * (start + cursor))
    return total
