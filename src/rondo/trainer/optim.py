"""AdamW and the learning rate's course."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up over the first steps, then constant, linear or cosine decay to zero at the last one."""

    peak: float
    warmup: int = 0
    total: int
    decay: str = "constant"

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.total - self.warmup)
        if self.decay == "linear":
            return self.peak * (1 - progress)
        if self.decay == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak


def adamw(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    *,
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.AdamW:
    """Weight decay on matrices only: it has no meaning for norms and biases."""
    parameters = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas)
