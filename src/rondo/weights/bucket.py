"""Weights in portions: what travels at once, and what a publication needs in memory at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    number: int  # place in the publication
    tensors: tuple[Named, ...]  # whole tensors, in the trainer's dtype and on its device


def buckets(tensors: Iterable[Named], *, dtype: torch.dtype, limit: int) -> Iterator[Bucket]:
    """Portions of at most `limit` bytes as published in `dtype`, each as soon as it is full; a larger tensor is one."""
    held: list[Named] = []
    size = number = 0
    for name, tensor in tensors:
        added = tensor.numel() * dtype.itemsize
        if held and size + added > limit:
            yield Bucket(number=number, tensors=tuple(held))
            held, size, number = [], 0, number + 1
        held.append((name, tensor))
        size += added
    if held:
        yield Bucket(number=number, tensors=tuple(held))
