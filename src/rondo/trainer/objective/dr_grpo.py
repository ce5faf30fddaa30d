"""Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): GRPO without its two biases.

    J = 1/(G L) Σ_i Σ_t min(r_it A_i, clip(r_it, 1 - ε, 1 + ε) A_i),   A_i = R_i - mean R

No division by the response's own length (a constant L, `max_new_tokens`, instead: `normalise = "constant"`), none by
the deviation of the group's rewards (`scale_advantages = false`). The surrogate itself is GRPO's.
"""

from __future__ import annotations

from rondo.trainer.objective.grpo import GRPO


class DrGRPO(GRPO):
    pass
