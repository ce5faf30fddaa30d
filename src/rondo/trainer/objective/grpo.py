"""GRPO (Shao et al., 2024, arXiv 2402.03300): PPO's clipped surrogate with group-relative advantages.

    J = 1/G Σ_i 1/|o_i| Σ_t min(r_it A_i, clip(r_it, 1 - ε, 1 + ε) A_i) - β KL
    r_it = π(o_it) / π_old(o_it),   A_i = (R_i - mean R) / std R   over the group

DAPO's separate bounds (ε_low, ε_high) are here from the start; GRPO sets both alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import TokenBatch, tally_clipped


@dataclass(frozen=True, kw_only=True)
class GRPO:
    clip_low: float
    clip_high: float

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        ratio_N = (batch.logps_N - batch.old_N).exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        tally_clipped(tally, ratio_N, clipped_N)
        return torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
