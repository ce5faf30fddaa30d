"""CISPO (MiniMax, 2025, arXiv 2506.13585): the importance weight is clipped, no token is dropped.

    J = 1/(Σ_i |o_i|) Σ_i Σ_t sg(clip(r_it, 1 - ε_low, 1 + ε_high)) A_i log π(o_it),   A_i as in GRPO

sg stops the gradient: a clipped token keeps its gradient, bounded in weight. The paper sets no lower bound
(`clip_low = 1`: the ratio is above 0 anyway) and does not print its upper one; the default allows a ratio of 5, that
is 1 + `clip_high` (ScaleRL's ε_max, arXiv 2510.13786, bounds the ratio itself; TRL recommends the same 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import TokenBatch, tally_clipped


@dataclass(frozen=True, kw_only=True)
class CISPO:
    clip_low: float
    clip_high: float

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        ratio_N = (batch.logps_N - batch.old_N).detach().exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        tally_clipped(tally, ratio_N, clipped_N)
        return clipped_N * batch.advantages_N * batch.logps_N
