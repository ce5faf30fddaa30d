"""Policy, old policy and reference: one layout, one code path, one micro-step.

The old policy exists only when a period has several updates (with one, it *is* the policy), the reference only when
there is a KL term. Neither ever has a gradient. With adapters in the policy (`lora.py`) all three are one model that
wears its trained adapters, the period's first ones, or none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rondo.attention.hf import hidden_states, suit
from rondo.attention.layout import Layout
from rondo.trainer.layers import compile_layers, decoder_layers
from rondo.trainer.logprobs import token_logps
from rondo.trainer.lora import OLD, adapted, merged_weights, refresh_old, wearing
from rondo.trainer.offload import offload
from rondo.trainer.parallel import own, shard_model
from rondo.trainer.precision import WorkingCopy, narrow_frozen


@dataclass(frozen=True, kw_only=True)
class TriLogps:
    policy_N: torch.Tensor  # with gradient
    old_N: torch.Tensor
    reference_N: torch.Tensor | None
    entropy_N: torch.Tensor | None = None  # of the policy, with gradient


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How the three are computed, alike for all."""

    dtype: torch.dtype | None = None  # of forward and backward; None: the policy's own. Masters stay as they are
    mesh: DeviceMesh | None = None  # over which they are sharded; None: this rank holds them whole
    offload: bool = False  # old policy and reference live on the host
    compiled: bool = False


class Scorer(torch.nn.Module):
    """A model as a function of a row. One forward and no other way in: a sharded model gathers its weights there."""

    def __init__(self, model: PreTrainedModel, temperature: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._dtype = dtype

    def forward(self, layout: Layout, *, entropy: bool = False, plain: bool = False) -> torch.Tensor:
        """`plain`: at temperature 1."""
        head = self.model.get_output_embeddings()
        return token_logps(
            head,
            hidden_states(self.model, layout, self._dtype),
            layout.target_N,
            temperature=1.0 if plain else self._temperature,
            vocabulary=head.weight.shape[0],
            entropy=entropy,
        )


class TriModel:
    def __init__(
        self,
        *,
        policy: PreTrainedModel,
        keep_old: bool,
        reference: PreTrainedModel | None,  # with adapters: the policy itself, which then computes without them
        temperature: float,
        entropy: bool = False,
        placement: Placement | None = None,
    ) -> None:
        self.policy = policy  # the masters
        self._placement = placement or Placement()
        self._temperature = temperature
        self._entropy = entropy
        self._keep_old = keep_old
        self._adapted = bool(adapted(policy))
        self._dtype = self._placement.dtype or policy.dtype
        assert (reference is policy) <= self._adapted
        self._shared_reference = reference is policy
        self.reference = self._frozen(reference) if reference is not None and reference is not policy else None
        self.old = self._frozen(copy.deepcopy(policy)) if keep_old and not self._adapted else None
        self._working: WorkingCopy | None = None
        if self._placement.mesh is not None:
            narrow_frozen(policy, self._dtype)
        elif self._dtype != next(trained for _, trained in self.named_parameters()).dtype:
            self._working = WorkingCopy(policy, self._dtype)
        self._policy_scorer = self._scorer(self._working.model if self._working else policy)
        self._old_scorer = self._scorer(self.old) if self.old is not None else None
        self._reference_scorer = self._scorer(self.reference) if self.reference is not None else None

    def begin_period(self) -> None:
        """The policy that generates this period becomes the old policy; never in the middle of one."""
        if self.old is not None:
            with torch.no_grad():
                for held, current in zip(self.old.parameters(), self.policy.parameters(), strict=True):
                    own(held).copy_(own(current))
        refresh_old(self.policy)

    def moved(self) -> None:
        """Called whenever the masters have changed."""
        if self._working is not None:
            self._working.refresh()

    def logps(self, layout: Layout) -> TriLogps:
        policy_N = self._policy_scorer(layout, entropy=self._entropy)
        policy_N, entropy_N = policy_N if self._entropy else (policy_N, None)
        with torch.no_grad():
            old_N = self._old(layout) if self._keep_old else policy_N.detach()
            reference_N = self._reference(layout)
        return TriLogps(policy_N=policy_N, old_N=old_N, reference_N=reference_N, entropy_N=entropy_N)

    def plain_logps(self, layout: Layout) -> torch.Tensor:
        """The policy's at temperature 1, without gradient."""
        scorer = self._policy_scorer
        with torch.no_grad():
            logps: torch.Tensor = scorer(layout, plain=True)
        if isinstance(scorer, FSDPModule):
            scorer.reshard()  # a backward would have done it
        return logps

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """What is trained: the policy's parameters, tied ones once; with adapters, those alone."""
        return [(name, parameter) for name, parameter in self.policy.named_parameters() if parameter.requires_grad]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy as an engine loads it, whole, one tensor at a time; every rank must go through all of them."""
        return merged_weights(self.policy)

    def reduce_gradients(self, now: bool) -> None:
        """Whether the backward passes to come sum gradients over the ranks of the mesh, or only here."""
        assert isinstance(self._policy_scorer, FSDPModule)
        self._policy_scorer.set_requires_gradient_sync(now)

    def _old(self, layout: Layout) -> torch.Tensor:
        if self._old_scorer is not None:
            return self._score(self._old_scorer, layout)
        with wearing(self._policy_scorer, OLD):
            return self._score(self._policy_scorer, layout)

    def _reference(self, layout: Layout) -> torch.Tensor | None:
        if self._reference_scorer is not None:
            return self._score(self._reference_scorer, layout)
        if not self._shared_reference:
            return None
        with wearing(self._policy_scorer, None):
            return self._score(self._policy_scorer, layout)

    def _score(self, scorer: torch.nn.Module, layout: Layout) -> torch.Tensor:
        logps: torch.Tensor = scorer(layout)
        return logps

    def _frozen(self, model: PreTrainedModel) -> PreTrainedModel:
        model.requires_grad_(False).eval()
        narrow_frozen(model, self._dtype)
        return model

    def _scorer(self, model: PreTrainedModel) -> torch.nn.Module:
        """The model as a function, placed where it computes."""
        place, device = self._placement, model.device
        suit(model, self._dtype)
        scorer, layers = Scorer(model, self._temperature, self._dtype), decoder_layers(model)
        away = place.offload and model in (self.old, self.reference)
        if place.compiled and not away:  # what moves between host and device would be compiled anew
            compile_layers(model)
        if place.mesh is not None:
            shard_model(scorer, layers, place.mesh, dtype=place.dtype, offloaded=away)
        elif away:
            offload(scorer, layers, device)
        return scorer
