"""What every objective takes and gives: tensors over response tokens in, one sum out.

Suffix N: response tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rondo.observe.metrics import Tally


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    logps_N: torch.Tensor  # of the policy, with gradient
    old_N: torch.Tensor  # of the policy that generated; the policy's own, detached, on the first update
    reference_N: torch.Tensor | None  # None: no KL term
    advantages_N: torch.Tensor
    weights_N: torch.Tensor  # 1, or one over the response's length, by what the sum will be divided by


class Objective(Protocol):
    """Returns the weighted *sum* of the token losses; the division happens once, in the trainer's step."""

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor: ...
