"""Two evaluations of the same tensors: how many bits differ, by how much, and how much rounding could explain.

The bound. A tensor's gradient g is a sum over n micro-batches, each computed by one forward and backward pass. With u
the unit roundoff of the sum (2^-24 in float32), adding n numbers in any order is off by at most gamma(n - 1) times the
sum of their absolute values, gamma(k) = k u / (1 - k u) (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
A pass over other batch mates also rounds differently inside, because matrix shapes differ; how much that is depends on
the model, so it is measured: the error e of the synchronous gradient against the same passes in float64. A gradient v
of the same groups in another order and packing is then within

    |v - g| <= gamma(n - 1) S  +  (1 + SPREAD) e        in the 2-norm of each tensor,  S = | sum over i of |g_i| |

of the synchronous one: its own sum's error, its own passes' error (as large as the measured one, times SPREAD for the
chance of one draw), and the error of the synchronous one itself. Where a tensor's true gradient is zero, all of it is
rounding; e then is its whole size, and the bound still holds it to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

SPREAD = 8.0  # how much larger than the measured one the rounding of passes of other shapes may be
_WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor against its reference."""

    name: str
    elements: int
    differing: int  # elements whose bits differ
    ulps: int  # the largest distance, in representable numbers between the two
    distance: float  # 2-norm of the difference
    norm: float  # 2-norm of the reference

    @property
    def relative(self) -> float:
        return self.distance / self.norm if self.norm else (0.0 if not self.distance else float("inf"))


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What rounding may do to one tensor's gradient."""

    error: float  # of the synchronous gradient against float64, 2-norm
    absolute: float  # S: 2-norm of the sum of the micro-batches' absolute gradients
    unit: float  # u of the dtype in which gradients are summed


def difference(name: str, found: torch.Tensor, reference: torch.Tensor) -> Difference:
    a, b = _ordered(found), _ordered(reference)
    apart = (a - b).abs()
    return Difference(
        name=name,
        elements=apart.numel(),
        differing=int((apart != 0).sum()),
        ulps=int(apart.max()) if apart.numel() else 0,
        distance=float((found.double() - reference.double()).norm()),
        norm=float(reference.double().norm()),
    )


def differences(found: Iterable[tuple[str, torch.Tensor]], reference: Mapping[str, torch.Tensor]) -> list[Difference]:
    """Tensor by tensor, as they come; all of them must be there."""
    seen = [difference(name, tensor.detach().cpu(), reference[name]) for name, tensor in found]
    assert {tensor.name for tensor in seen} == reference.keys(), "the two models have other tensors"
    return seen


def gamma(count: int, unit: float) -> float:
    return count * unit / (1 - count * unit)


def bound(rounding: Rounding, micros: int) -> float:
    """On the distance from the synchronous gradient, for a sum of so many micro-batches."""
    return gamma(max(0, micros - 1), rounding.unit) * rounding.absolute + (1 + SPREAD) * rounding.error


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers that ascend with the number: neighbours differ by one, and minus zero comes right before
    zero, since its sign is a bit that differs."""
    words = tensor.detach().cpu().contiguous().reshape(-1).view(_WORD[tensor.element_size()]).to(torch.int64)
    smallest = -(1 << (8 * tensor.element_size() - 1))
    return torch.where(words < 0, smallest - words - 1, words)
