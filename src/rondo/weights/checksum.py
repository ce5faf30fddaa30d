"""A checksum of tensors that is the same on every device.

Each tensor's bytes, as 64-bit words (the last one filled up with zeros), are summed with their position as weight, in
arithmetic that wraps; integer sums do not depend on order, so a GPU and a CPU agree. The tensors' sums, names, types
and shapes are then hashed together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

_COLUMNS, _BLOCK = 4096, 4096 * 16384
_HOST_COLUMNS, _HOST_BLOCK = 1024, 1024 * 256  # 2 MB at a time: stays in a core's cache


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
    if tensor.device.type == "cpu":
        return torch.from_numpy(np.array(_sum_on_host(words.numpy())))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    columns = torch.arange(_COLUMNS, device=words.device) * 2 + 1
    for start in range(0, words.numel(), _BLOCK):
        chunk = words[start : start + _BLOCK]
        whole = chunk.numel() // _COLUMNS * _COLUMNS
        # A word's weight is its row's part plus its column's: two plain sums, where a product would need a copy.
        table = chunk[:whole].view(-1, _COLUMNS)
        rows = torch.arange(table.shape[0], device=words.device) * (2 * _COLUMNS) + 2 * start
        total += (table.sum(1) * rows).sum() + (table.sum(0) * columns).sum()
        rest = torch.arange(start + whole, start + chunk.numel(), device=words.device) * 2 + 1
        total += (chunk[whole:] * rest).sum()
    return total


def _sum_on_host(words: NDArray[np.int64]) -> np.int64:
    """The same with numpy: in one thread and from the core's cache. Many small operations in several threads wait for
    each other longer than they work (seconds per GB were seen on busy cores)."""
    total = np.zeros((), dtype=np.int64)
    columns = np.arange(_HOST_COLUMNS, dtype=np.int64) * 2 + 1
    for start in range(0, words.size, _HOST_BLOCK):
        chunk = words[start : start + _HOST_BLOCK]
        whole = chunk.size // _HOST_COLUMNS * _HOST_COLUMNS
        table = chunk[:whole].reshape(-1, _HOST_COLUMNS)
        rows = np.arange(table.shape[0], dtype=np.int64) * (2 * _HOST_COLUMNS) + 2 * start
        rest = np.arange(start + whole, start + chunk.size, dtype=np.int64) * 2 + 1
        with np.errstate(over="ignore"):  # it is meant to wrap; numpy warns where both are scalars
            total += np.dot(table.sum(1), rows) + np.dot(table.sum(0), columns)
            total += np.dot(chunk[whole:], rest)
    return np.int64(total)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)
