"""REINFORCE++ (Hu et al., 2025, arXiv 2501.03262): PPO's clipped surrogate without a critic or group statistics.

    J = 1/|batch| Σ_i 1/|o_i| Σ_t min(r_it A_i, clip(r_it, 1 - ε, 1 + ε) A_i)
    A_i = (R_i - mean R) / std R   over all tokens of the period, each with its response's R

The surrogate is GRPO's; the advantages need the whole period, so the loader waits for it (`rollout/advantage.py`).
Mean and deviation are over tokens, as in the paper's global normalisation and in OpenRLHF and verl: a long response
counts more. The paper's token-level KL inside the reward (k1, summed from each token on) is left out: its whitening
would need the reference's log-probs of the whole period before the first backward. The KL term of the loss takes its
place, by default with k2, as the paper's own variant for groups ("with baseline") has it.
"""

from __future__ import annotations

from rondo.trainer.objective.grpo import GRPO


class ReinforcePP(GRPO):
    pass
