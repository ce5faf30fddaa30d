"""Truncated importance correction of the engine's numerics (Yao et al., 2025, "Your efficient RL framework secretly
brings you off-policy RL training").

The engine computes the same weights with other kernels, so a token was really sampled from π_engine, not from π_old:

    w_t = min(π_old(t) / π_engine(t), cap),   without gradient

multiplies the token's surrogate. KL and entropy terms are left as they are.
"""

from __future__ import annotations

import torch


def engine_correction(old_N: torch.Tensor, engine_N: torch.Tensor, *, cap: float) -> torch.Tensor:
    return (old_N - engine_N).detach().exp().clamp(max=cap)
