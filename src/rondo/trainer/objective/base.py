"""What every objective takes and gives: tensors over response tokens in, one sum out.

An algorithm is a surrogate (one short file each); KL, entropy and the engine correction are terms that any of them may
carry. Suffixes: N response tokens of one micro-batch, M its responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.objective.correction import engine_correction
from rondo.trainer.objective.kl import kl_estimate


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    logps_N: torch.Tensor  # of the policy, with gradient
    old_N: torch.Tensor  # of the policy that generated; the policy's own, detached, on the first update
    engine_N: torch.Tensor  # what the engine said that old_N is
    reference_N: torch.Tensor | None  # None: no KL anywhere
    entropy_N: torch.Tensor | None  # of the policy, with gradient; None: no entropy bonus
    advantages_N: torch.Tensor
    weights_N: torch.Tensor  # 1, or one over the response's length, by what the sum will be divided by
    lengths_M: torch.Tensor  # tokens per response, in the order of N

    def per_response(self, values_N: torch.Tensor) -> torch.Tensor:
        """Sums over each response, [M]."""
        return sum_per_response(values_N, self.lengths_M)

    def per_token(self, values_M: torch.Tensor) -> torch.Tensor:
        """Each response's value at all of its tokens, [N]."""
        return values_M.repeat_interleave(self.lengths_M)


class Surrogate(Protocol):
    """What an algorithm maximises, per token: [N]. Where it is one value per response, that value at each token."""

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Returns the weighted *sum* of the token losses; the division happens once, in the trainer's step."""

    surrogate: Surrogate
    kl_coefficient: float = 0.0  # of the term in the loss
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0
    correction_cap: float = 0.0  # 0: the engine's log-probs are taken for the trainer's

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        count = batch.logps_N.numel()
        loss_N = -self.surrogate(batch, tally)
        if self.correction_cap:
            correction_N = engine_correction(batch.old_N, batch.engine_N, cap=self.correction_cap)
            tally.mean("correction", correction_N.sum(), count)
            loss_N = loss_N * correction_N
        if self.kl_coefficient:
            assert batch.reference_N is not None
            kl_N = kl_estimate(batch.logps_N, batch.reference_N, self.kl_estimator)
            tally.mean("kl", kl_N.detach().sum(), count)
            loss_N = loss_N + self.kl_coefficient * kl_N
        if self.entropy_coefficient:
            assert batch.entropy_N is not None
            tally.mean("policy_entropy", batch.entropy_N.detach().sum(), count)
            loss_N = loss_N - self.entropy_coefficient * batch.entropy_N
        return (loss_N * batch.weights_N).sum()


def sum_per_response(values_N: torch.Tensor, lengths_M: torch.Tensor) -> torch.Tensor:
    """Piece by piece, not by a scatter: the result does not depend on the order in which threads add."""
    return torch.stack([piece.sum() for piece in torch.split(values_N, lengths_M.tolist())])


def tally_clipped(tally: Tally, ratio: torch.Tensor, clipped: torch.Tensor) -> None:
    tally.mean("clip_fraction", (ratio != clipped).sum(), ratio.numel())
