"""RLOO (Ahmadian et al., 2024, arXiv 2402.14740): REINFORCE on whole responses, each the others' baseline.

    ∇J = 1/G Σ_i A_i ∇ log π(o_i),   A_i = R_i - mean of the other rewards of its group

A response is one action: its log-prob is the sum over its tokens. The surrogate is that action's ratio,

    J = 1/G Σ_i min(ρ_i A_i, clip(ρ_i, 1 - ε, 1 + ε) A_i),   ρ_i = π(o_i) / π_old(o_i)

whose gradient on the first update (ρ = 1) is the paper's; later updates of a period, which the paper does not have, are
clipped as PPO would. The value stands at each token, as in GSPO: it belongs with `normalise = "sequences"`. The
paper's KL is part of the reward (`kl_reward.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import TokenBatch, tally_clipped


@dataclass(frozen=True, kw_only=True)
class RLOO:
    clip_low: float
    clip_high: float

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        ratio_M = batch.per_response(batch.logps_N - batch.old_N).exp()
        clipped_M = ratio_M.clamp(1 - self.clip_low, 1 + self.clip_high)
        tally_clipped(tally, ratio_M, clipped_M)
        ratio_N, clipped_N = batch.per_token(ratio_M), batch.per_token(clipped_M)
        return torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
