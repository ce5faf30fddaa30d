"""GRPO (Shao et al., 2024, arXiv 2402.03300): PPO's clipped surrogate with group-relative advantages, and a KL term."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import TokenBatch
from rondo.trainer.objective.kl import kl_estimate


@dataclass(frozen=True, kw_only=True)
class GRPO:
    clip: float
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"

    def __call__(self, batch: TokenBatch, tally: Tally) -> torch.Tensor:
        ratio_N = (batch.logps_N - batch.old_N).exp()
        clipped_N = ratio_N.clamp(1 - self.clip, 1 + self.clip)
        surrogate_N = torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
        loss_N = -surrogate_N
        count = batch.logps_N.numel()
        tally.mean("clip_fraction", (ratio_N != clipped_N).sum(), count)
        if batch.reference_N is not None:
            kl_N = kl_estimate(batch.logps_N, batch.reference_N, self.kl_estimator)
            loss_N = loss_N + self.kl_coefficient * kl_N
            tally.mean("kl", kl_N.detach().sum(), count)
        return (loss_N * batch.weights_N).sum()
