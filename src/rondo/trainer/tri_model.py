"""Policy, old policy and reference: one layout, one code path, one micro-step.

The old policy exists only when a period has several updates (with one, it *is* the policy), the reference only when
there is a KL term. Neither ever has a gradient.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rondo.attention.hf import hidden_states
from rondo.attention.layout import Layout
from rondo.trainer.layers import decoder_layers
from rondo.trainer.logprobs import token_logps
from rondo.trainer.parallel import shard_model


@dataclass(frozen=True, kw_only=True)
class TriLogps:
    policy_N: torch.Tensor  # with gradient
    old_N: torch.Tensor
    reference_N: torch.Tensor | None
    entropy_N: torch.Tensor | None = None  # of the policy, with gradient


class Scorer(torch.nn.Module):
    """A model as a function of a row. One forward and no other way in: a sharded model gathers its weights there."""

    def __init__(self, model: PreTrainedModel, temperature: float, *, entropy: bool = False) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._entropy = entropy

    def forward(self, layout: Layout, *, plain: bool = False) -> torch.Tensor:
        """`plain`: at temperature 1 and without entropy, whatever the objective wants."""
        head = self.model.get_output_embeddings()
        return token_logps(
            head,
            hidden_states(self.model, layout),
            layout.target_N,
            temperature=1.0 if plain else self._temperature,
            vocabulary=head.weight.shape[0],
            entropy=self._entropy and not plain,
        )


class TriModel:
    def __init__(
        self,
        *,
        policy: PreTrainedModel,
        keep_old: bool,
        reference: PreTrainedModel | None,
        temperature: float,
        entropy: bool = False,
    ) -> None:
        self.policy = policy
        self.old = _frozen(copy.deepcopy(policy)) if keep_old else None
        self.reference = _frozen(reference) if reference is not None else None
        self._entropy = entropy
        self._scorers = {
            model: Scorer(model, temperature, entropy=entropy and model is policy) for model in self._models()
        }

    def shard(self, mesh: DeviceMesh) -> None:
        """Spread all three over the ranks of the mesh, in the same way."""
        for model in self._models():
            shard_model(self._scorers[model], decoder_layers(model), mesh)

    def begin_period(self) -> None:
        """The policy that generates this period becomes the old policy; never in the middle of one."""
        if self.old is not None:
            with torch.no_grad():
                for held, current in zip(self.old.parameters(), self.policy.parameters(), strict=True):
                    held.copy_(current)

    def logps(self, layout: Layout) -> TriLogps:
        policy_N = self._score(self.policy, layout)
        policy_N, entropy_N = policy_N if self._entropy else (policy_N, None)
        with torch.no_grad():
            old_N = policy_N.detach() if self.old is None else self._score(self.old, layout)
            reference_N = None if self.reference is None else self._score(self.reference, layout)
        return TriLogps(policy_N=policy_N, old_N=old_N, reference_N=reference_N, entropy_N=entropy_N)

    def plain_logps(self, layout: Layout) -> torch.Tensor:
        """The policy's, without gradient."""
        scorer = self._scorers[self.policy]
        with torch.no_grad():
            logps: torch.Tensor = scorer(layout, plain=True)
        if isinstance(scorer, FSDPModule):
            scorer.reshard()  # a backward would have done it
        return logps

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The policy's, tied ones once."""
        return list(self.policy.named_parameters())

    def _models(self) -> list[PreTrainedModel]:
        return [model for model in (self.policy, self.old, self.reference) if model is not None]

    def _score(self, model: PreTrainedModel, layout: Layout) -> torch.Tensor:
        logps: torch.Tensor = self._scorers[model](layout)
        return logps


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model.requires_grad_(False).eval()
