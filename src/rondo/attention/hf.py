"""Plugs shared-prompt attention into transformers' registries, so that any decoder it supports can use it.

A packed row goes through the model's own layers; only the attention function differs, and it receives the row's
plan through a keyword that transformers hands down from the model's `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rondo.attention.flex import flex_attention_row, flex_plan
from rondo.attention.layout import Layout, separate_layout, shared_prompt_layout
from rondo.attention.native import native_hidden_states
from rondo.attention.reference import dense_attention
from rondo.attention.split import split_attention, split_plan
from rondo.attention.varlen import fits, varlen_attention, varlen_plan
from rondo.errors import ModelError

SPLIT = "rondo_split"
VARLEN = "rondo_varlen"
FLEX = "rondo_flex"
DENSE = "rondo_dense"

_PATHS: dict[str, tuple[Callable[[Layout, torch.dtype], Any], Callable[..., torch.Tensor]]] = {
    SPLIT: (split_plan, split_attention),
    VARLEN: (lambda layout, _: varlen_plan(layout), varlen_attention),
    FLEX: (lambda layout, _: flex_plan(layout), flex_attention_row),
    DENSE: (lambda layout, _: layout, dense_attention),
}


def _function(compute: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        rondo_plan: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        return compute(query, key, value, plan=rondo_plan, scaling=scaling), None

    return attend


for _name, (_, _compute) in _PATHS.items():
    AttentionInterface.register(_name, _function(_compute))
    AttentionMaskInterface.register(_name, lambda *args, **kwargs: None)


def hidden_states(model: PreTrainedModel, layout: Layout, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The last layer's states [N, C] at the positions that predict a response token.

    `dtype`: what the model computes in, where its parameters do not tell.
    """
    if model.config._attn_implementation not in _PATHS:
        return native_hidden_states(model, layout)
    make_plan, _ = _PATHS[model.config._attn_implementation]
    output = model.base_model(
        input_ids=layout.tokens_T.unsqueeze(0),
        position_ids=layout.positions_T.unsqueeze(0),
        attention_mask=None,
        use_cache=False,
        rondo_plan=make_plan(layout, dtype or model.dtype),
    )
    states: torch.Tensor = output.last_hidden_state[0]
    return states[layout.source_N]


def adopt(model: PreTrainedModel, implementation: str | None = None) -> None:
    """Put `model` on shared-prompt attention (the path that suits its device and dtype), or say why it cannot be.

    What the config does not tell is found by trying: a short packed row must give the log-probs that the model
    gives for separate rows by its own attention.
    """
    name = type(model).__name__
    kinds = getattr(model.config, "layer_types", None)
    if others := sorted(set(kinds or ()) - {"full_attention"}):
        raise ModelError(f"{name} has {', '.join(others)} layers: shared-prompt attention needs full attention")
    if kinds is None and (window := getattr(model.config, "sliding_window", None)):
        raise ModelError(f"{name} has a sliding window of {window}: shared-prompt attention needs full attention")
    own = model.config._attn_implementation
    if own in _PATHS:  # adopted, and so tried, before
        model.set_attn_implementation(implementation or own)
        return
    truth = _truth(model)
    model.set_attn_implementation(implementation or _suitable(model.device, model.dtype))
    for layout in (separate_layout([(_PROMPT, _RESPONSES)]), shared_prompt_layout([(_PROMPT, _RESPONSES)])):
        gap = _gap(model, layout, truth)
        if not gap <= _tolerance(model):
            model.set_attn_implementation(own)
            raise ModelError(
                f"{name} cannot be trained on packed rows: its log-probs there are off by {gap:.3g} from its own "
                "(its attention or its output head does more than transformers' common interface tells)"
            )


def suit(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Once adopted: the path for what the model will compute in, whatever its parameters are held in."""
    if model.config._attn_implementation in (SPLIT, VARLEN):
        model.set_attn_implementation(_suitable(model.device, dtype))


def adopt_or_explain(model: PreTrainedModel) -> str | None:
    """Put `model` on shared-prompt attention; or leave it on its own, fit for separate rows, and say why.

    Raises ModelError when its log-probs cannot be had either way.
    """
    try:
        adopt(model)
    except ModelError as refusal:
        gap = _gap(model, separate_layout([(_PROMPT, _RESPONSES)]), _truth(model))
        if not gap <= _tolerance(model):
            raise
        return str(refusal)
    return None


_PROMPT, _RESPONSES = [1, 2, 3, 1], [[2, 1, 3], [3, 3], [1]]


def _suitable(device: torch.device, dtype: torch.dtype) -> str:
    return VARLEN if fits(device, dtype) else SPLIT


def _tolerance(model: PreTrainedModel) -> float:
    return 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1


def _truth(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([_own_logps(model, _PROMPT, response) for response in _RESPONSES])


def _gap(model: PreTrainedModel, layout: Layout, truth: torch.Tensor) -> float:
    return float((_packed_logps(model, layout) - truth).abs().max())


@torch.no_grad()
def _own_logps(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + response], device=model.device)
    logps: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return logps[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


@torch.no_grad()
def _packed_logps(model: PreTrainedModel, layout: Layout) -> torch.Tensor:
    layout = layout.to(model.device)
    logits: torch.Tensor = model.get_output_embeddings()(hidden_states(model, layout))
    return logits.float().log_softmax(-1).gather(-1, layout.target_N[:, None])[:, 0].cpu()
