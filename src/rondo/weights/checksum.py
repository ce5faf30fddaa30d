"""A checksum of tensors that is the same on every device.

Each tensor's raw words (integers as wide as its elements) are summed with their position as weight, in 64-bit
arithmetic that wraps; integer sums do not depend on order, so a GPU and a CPU agree. The tensors' sums, names,
types and shapes are then hashed together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # words weighted at once: bounds the 64-bit temporaries to a few dozen MB


def tensor_sum(tensor: torch.Tensor) -> int:
    """The position-weighted 64-bit sum of one tensor's raw words."""
    words = tensor.detach().contiguous().reshape(-1).view(_WORD[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        # Odd weights are invertible modulo 2^64: no single changed word goes unseen.
        weights = torch.arange(start, start + chunk.numel(), device=tensor.device) * 2 + 1
        total += (chunk * weights).sum()
    return int(total.item())


class Checksum:
    """Of named tensors that come one after the other; none of them is kept."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor_sum(tensor)}\n".encode())

    def digest(self) -> str:
        return self._digest.hexdigest()[:16]


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One hexadecimal word for an ordered list of named tensors."""
    total = Checksum()
    for name, tensor in tensors:
        total.add(name, tensor)
    return total.digest()
