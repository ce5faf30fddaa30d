"""KL inside the reward (RLOO, arXiv 2402.14740; PPO for language models before it).

    R_i = r_i - β Σ_t k(t),   k(t) an estimate of KL(π_old || π_ref) at token t,   then A from R as usual

The penalty belongs to what was sampled, so it is taken under the policy that generated, without gradient, and stays the
same through all updates of a period. The reference's log-probs exist only in the trainer's micro-step: there the
advantages of each group are computed anew from its penalised rewards. This is exact when the group is whole in its
micro-batch; a split group is refused, for its mean would need the responses of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rondo.errors import ConfigError
from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import sum_per_response
from rondo.trainer.objective.kl import kl_estimate
from rondo.types import Part


@dataclass(frozen=True, kw_only=True)
class RewardKL:
    coefficient: float
    estimator: str
    advantages: Callable[[Sequence[float]], tuple[float, ...]]  # of one group, from its rewards

    def __call__(
        self,
        parts: Sequence[Part],
        *,
        old_N: torch.Tensor,
        reference_N: torch.Tensor,
        lengths_M: torch.Tensor,
        tally: Tally,
    ) -> list[float]:
        """The advantages of all responses of the micro-batch, [M]."""
        kl_N = kl_estimate(old_N, reference_N, self.estimator)
        tally.mean("kl", kl_N.sum(), kl_N.numel())
        penalties = iter((self.coefficient * sum_per_response(kl_N, lengths_M)).tolist())
        found: list[float] = []
        for part in parts:
            _check_whole(part)
            rewards = part.group.rewards
            found += self.advantages([reward - next(penalties) for reward in rewards])
        return found


def _check_whole(part: Part) -> None:
    if len(part.responses) != len(part.group.rewards):
        raise ConfigError(
            f'algorithm.kl.place = "reward" needs every group whole in one micro-batch, but prompt '
            f"{part.group.prompt.ordinal} with its responses has {part.group.tokens} tokens, more than "
            f'trainer.micro_tokens: raise that, or set algorithm.kl.place = "loss"'
        )
