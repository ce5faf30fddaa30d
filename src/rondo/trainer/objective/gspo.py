"""GSPO (Zheng et al., 2025, arXiv 2507.18071): the ratio of whole responses, per token in the geometric mean.

    J = 1/G Σ_i min(s_i A_i, clip(s_i, 1 - ε_low, 1 + ε_high) A_i)
    s_i = (π(o_i) / π_old(o_i))^(1/|o_i|) = exp(1/|o_i| Σ_t log r_it),   A_i as in GRPO

The paper (v2, section 5.1) sets ε to 3e-4 and 4e-4, takes four updates per batch of rollouts (`updates_per_period = 4`;
with one the ratio is 1 and nothing is clipped) and has no KL. A response is clipped as a whole. Its value stands at
each of its tokens: `normalise = "sequences"` weighs each by 1/|o_i|, which gives the paper's sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import TokenBatch, tally_clipped


@dataclass(frozen=True, kw_only=True)
class GSPO:
    clip_low: float
    clip_high: float

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        ratio_M = (batch.per_response(batch.logps_N - batch.old_N) / batch.lengths_M).exp()
        clipped_M = ratio_M.clamp(1 - self.clip_low, 1 + self.clip_high)
        tally_clipped(tally, ratio_M, clipped_M)
        ratio_N, clipped_N = batch.per_token(ratio_M), batch.per_token(clipped_M)
        return torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
