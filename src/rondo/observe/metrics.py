"""Metrics that know how they reduce, so that no loop holds statistics code."""

from __future__ import annotations

from typing import Any

import torch

Number = float | int | torch.Tensor


class Tally:
    """Sums, means and maxima, added to piece by piece and read once. Tensors stay on their device until then."""

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._means: dict[str, tuple[Number, Number]] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: Number) -> None:
        self._sums[name] = self._sums.get(name, 0) + value

    def mean(self, name: str, total: Number, count: Number) -> None:
        """The mean of everything that was added under this name: the sum of totals over the sum of counts."""
        total_before, count_before = self._means.get(name, (0, 0))
        self._means[name] = (total_before + total, count_before + count)

    def maximum(self, name: str, value: Number) -> None:
        held = torch.as_tensor(value)
        self._maxima[name] = torch.maximum(self._maxima.get(name, held), held)

    def dump(self) -> dict[str, dict[str, Any]]:
        """As plain numbers, to travel to another process."""
        return {
            "sums": {name: float(value) for name, value in self._sums.items()},
            "means": {name: [float(total), float(count)] for name, (total, count) in self._means.items()},
            "maxima": {name: float(value) for name, value in self._maxima.items()},
        }

    def merge(self, dumped: dict[str, dict[str, Any]]) -> None:
        for name, value in dumped["sums"].items():
            self.add(name, value)
        for name, (total, count) in dumped["means"].items():
            self.mean(name, total, count)
        for name, value in dumped["maxima"].items():
            self.maximum(name, value)

    def read(self) -> dict[str, float]:
        means = {name: float(total) / float(count) for name, (total, count) in self._means.items() if float(count)}
        return (
            {name: float(value) for name, value in self._sums.items()}
            | means
            | {name: float(value) for name, value in self._maxima.items()}
        )
