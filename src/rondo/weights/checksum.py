"""A checksum of tensors that is the same on every device.

Each tensor's bytes, as 64-bit words (the last one filled up with zeros), are summed with their position as weight, in
arithmetic that wraps; integer sums do not depend on order, so a GPU and a CPU agree. The tensors' sums, names, types
and shapes are then hashed together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

_COLUMNS = 4096
_ROWS = {"cpu": 64}  # 2 MB at a time: stays in a core's cache
_ROWS_ELSEWHERE = 16384


class Checksum:
    """Adds up named tensors in the order in which they come; nothing waits for their device before `digest`."""

    def __init__(self) -> None:
        self._labels: list[str] = []
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._labels.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
        self._sums.append(weighted_sum(tensor))

    def digest(self) -> str:
        """One hexadecimal word."""
        devices = {held.device for held in self._sums}
        values = torch.stack(self._sums).tolist() if len(devices) == 1 else [int(held) for held in self._sums]
        digest = hashlib.sha256()
        for label, value in zip(self._labels, values, strict=True):
            digest.update(f"{label} {value}\n".encode())
        return digest.hexdigest()[:16]


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One hexadecimal word for an ordered list of named tensors."""
    total = Checksum()
    for name, tensor in tensors:
        total.add(name, tensor)
    return total.digest()


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over words i of word_i * (2 i + 1), wrapped to 64 bits: odd weights are invertible modulo 2^64, so no
    single changed word goes unseen."""
    words = _words(tensor)
    rows = _ROWS.get(tensor.device.type, _ROWS_ELSEWHERE)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    columns = _weights(_COLUMNS, 0, words)
    block, start = rows * _COLUMNS, 0
    while start < words.numel():
        chunk = words[start : start + block]
        whole = chunk.numel() // _COLUMNS * _COLUMNS
        # A word's weight is its row's part plus its column's: two plain sums, where a product would need a copy.
        table = chunk[:whole].view(-1, _COLUMNS)
        offsets = torch.arange(table.shape[0], device=words.device) * (2 * _COLUMNS) + 2 * start
        total += (table.sum(1) * offsets).sum() + (table.sum(0) * columns).sum()
        if whole < chunk.numel():
            rest = chunk[whole:]
            total += (rest * _weights(rest.numel(), start + whole, words)).sum()
        start += block
    return total


def _weights(count: int, start: int, words: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, start + count, device=words.device) * 2 + 1


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)
