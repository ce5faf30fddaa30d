"""How the gradients of many backward passes become one.

`FloatSum` leaves it to autograd, which adds in the order in which the passes come. `IntegerSum` is the proof mode: the
gradient of each part of a group is rounded to a whole number of units, and whole numbers are added, locally and then
over all ranks. Their sum does not depend on order, so neither arrival nor rank assignment nor rank count can change
a bit. It holds 8 bytes per parameter on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from rondo.errors import NonFiniteGradientError, RondoError
from rondo.trainer.parallel import Ranks
from rondo.types import MicroBatch

UNIT_BITS = 40  # a unit is 2^-40: 9e-13 of a raw gradient sum, which may grow to 2^22, about 4 million
LIMIT_BITS = 62


class Accumulator(Protocol):
    def pieces(self, micro: MicroBatch) -> Sequence[MicroBatch]:
        """What of a micro-batch goes through one backward pass each."""

    def collect(self, piece: MicroBatch) -> None:
        """Called after each backward pass."""

    def total(self) -> list[torch.Tensor]:
        """The sums over everything and all ranks, as the parameters' gradients; zeros where nothing was run."""

    def clear(self) -> None: ...


class FloatSum:
    """Over one rank, or over sharded parameters, whose gradients FSDP2 sums in every backward pass."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def pieces(self, micro: MicroBatch) -> Sequence[MicroBatch]:
        return [micro]

    def collect(self, piece: MicroBatch) -> None:
        pass

    def total(self) -> list[torch.Tensor]:
        return [_gradient(parameter) for parameter in self._parameters]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class IntegerSum:
    """Over ranks that each hold the whole model."""

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], ranks: Ranks) -> None:
        self._named = list(named)
        self._ranks = ranks
        self._sums = [
            torch.zeros(parameter.shape, dtype=torch.int64, device=parameter.device) for _, parameter in self._named
        ]
        self.clear()

    def pieces(self, micro: MicroBatch) -> Sequence[MicroBatch]:
        return [MicroBatch(parts=(part,)) for part in micro.parts]

    def collect(self, piece: MicroBatch) -> None:
        peaks = []
        for (_, parameter), total in zip(self._named, self._sums, strict=True):
            units = (_gradient(parameter).double() * 2.0**UNIT_BITS).round_()
            peaks.append(units.abs().max())
            total += units.long()
            parameter.grad = None
        self._bounds += torch.stack(peaks)
        self._refuse(piece)

    def total(self) -> list[torch.Tensor]:
        for number, bounds in enumerate(zip(*self._ranks.exchange(self._bounds.tolist()), strict=True)):
            if sum(bounds) >= 2.0**LIMIT_BITS:
                raise self._overflow(number)
        for (_, parameter), total in zip(self._named, self._sums, strict=True):
            self._ranks.add_up(total)
            parameter.grad = (total.double() * 2.0**-UNIT_BITS).to(parameter.dtype)
        return [_gradient(parameter) for _, parameter in self._named]

    def clear(self) -> None:
        for (_, parameter), total in zip(self._named, self._sums, strict=True):
            parameter.grad = None
            total.zero_()
        # Per tensor, the sum of every pass's largest magnitude: no element can exceed it, in whatever order.
        self._bounds = torch.zeros(len(self._named), dtype=torch.float64, device=self._sums[0].device)

    def _refuse(self, piece: MicroBatch) -> None:
        """Before a number that no integer can hold is believed."""
        if bool((self._bounds < 2.0**LIMIT_BITS).all()):
            return
        if not bool(self._bounds.isfinite().all()):
            ordinals = ", ".join(f"prompt {part.group.prompt.ordinal}" for part in piece.parts)
            raise NonFiniteGradientError(
                f"the gradient of {ordinals} is not finite. No step was taken: check the rewards of "
                "this prompt, or lower trainer.learning_rate"
            )
        raise self._overflow(int(self._bounds.argmax()))

    def _overflow(self, number: int) -> RondoError:
        return RondoError(
            f"the gradient of {self._named[number][0]} may exceed 2^{LIMIT_BITS - UNIT_BITS}, the largest sum that "
            'trainer.accumulation = "exact" can hold: set it to "fast", or scale the rewards down'
        )


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
