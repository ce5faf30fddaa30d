"""Estimators of KL(policy || reference) per token, from samples of the policy.

With x = log reference - log policy: k1 = -x, k2 = x² / 2, k3 = exp(x) - 1 - x (Schulman, "Approximating KL
divergence", 2020).
"""

from __future__ import annotations

import torch


def kl_estimate(logps_N: torch.Tensor, reference_N: torch.Tensor, estimator: str) -> torch.Tensor:
    x = reference_N - logps_N
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    assert estimator == "k3", estimator
    return x.exp() - 1 - x
