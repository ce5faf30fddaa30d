"""Log-probs of given responses under any transformers causal LM: shared-prompt attention for a user's own code."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from rondo.attention.hf import adopt_or_explain, hidden_states
from rondo.attention.layout import TokenIds, separate_layout, shared_prompt_layout
from rondo.errors import ConfigError
from rondo.trainer.logprobs import token_logps

_PATHS: WeakKeyDictionary[PreTrainedModel, tuple[str, str | None]] = (
    WeakKeyDictionary()
)  # what a model was found to take


def score(
    model: PreTrainedModel,
    groups: Sequence[tuple[TokenIds, Sequence[TokenIds]]],
    *,
    attention: str = "shared-prompt",
    temperature: float = 1.0,
) -> list[list[torch.Tensor]]:
    """One 1-D tensor of log-probs per response, for every group; differentiable when gradients are on.

    A model that packed rows would compute wrongly is scored row by row with its own attention.
    """
    if attention not in ("shared-prompt", "separate"):
        raise ConfigError(f"attention = {attention!r}: use 'shared-prompt' or 'separate'")
    own = model.config._attn_implementation
    if model not in _PATHS:
        refusal = adopt_or_explain(model)
        _PATHS[model] = (model.config._attn_implementation, refusal)
    path, refusal = _PATHS[model]
    shared = attention == "shared-prompt" and refusal is None
    layout = (shared_prompt_layout if shared else separate_layout)(groups).to(model.device)
    head = model.get_output_embeddings()
    model.set_attn_implementation(path)
    try:
        logps_N = token_logps(
            head,
            hidden_states(model, layout),
            layout.target_N,
            temperature=temperature,
            vocabulary=head.weight.shape[0],
        )
    finally:
        model.set_attn_implementation(own)
    pieces = iter(torch.split(logps_N, layout.lengths_M.tolist()))
    return [[next(pieces) for _ in responses] for _, responses in groups]
