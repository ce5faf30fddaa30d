"""A trainer whose every micro-batch and step is told to someone who keeps the books."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.ensemble import AnyTrainer
from rondo.types import MicroBatch, StepHashes


class Books(Protocol):
    def micro(self, micro: MicroBatch) -> None:
        """Called before the micro-batch is trained."""

    def step(self, hashes: StepHashes | None) -> None:
        """Called after the step; None where nothing is hashed."""


class Accounted:
    """Stands where the trainer would stand."""

    def __init__(self, trainer: AnyTrainer, books: Books, *, before_step: Callable[[], None] = lambda: None) -> None:
        self._trainer = trainer
        self._books = books
        self._before_step = before_step

    @property
    def tally(self) -> Tally:
        return self._trainer.tally

    @property
    def steps(self) -> int:
        return self._trainer.steps

    @property
    def hashes(self) -> StepHashes | None:
        return self._trainer.hashes

    def begin_period(self) -> None:
        self._trainer.begin_period()

    def accumulate(self, micro: MicroBatch) -> None:
        self._books.micro(micro)
        self._trainer.accumulate(micro)

    def step(self) -> None:
        self._before_step()
        self._trainer.step()
        self._books.step(self._trainer.hashes)

    def gradient(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._trainer.gradient()

    def discard(self) -> None:
        self._trainer.discard()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._trainer.weights()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return self._trainer.score(token_ids)

    def write(self, folder: Path) -> None:
        self._trainer.write(folder)

    def read(self, folder: Path, *, steps: int) -> None:
        self._trainer.read(folder, steps=steps)

    def close(self) -> None:
        self._trainer.close()
