"""DAPO (Yu et al., 2025, arXiv 2503.14476).

    J = 1/(Σ_i |o_i|) Σ_i Σ_t min(r_it A_i, clip(r_it, 1 - ε_low, 1 + ε_high) A_i),   A_i as in GRPO

"Clip-higher" lets unlikely tokens grow further than they may shrink; every token of the update weighs the same
(`normalise = "tokens"`). The surrogate is GRPO's with two bounds. The paper's other two parts are no part of the loss:
dynamic sampling is `rollout/filters.py`, soft overlong punishment is `rollout/overlong.py`. Its settings: ε 0.2 and
0.28, no KL, a buffer of the last 4096 of 20480 tokens (`overlong_buffer = 0.2`).
"""

from __future__ import annotations

from rondo.trainer.objective.grpo import GRPO


class DAPO(GRPO):
    pass
