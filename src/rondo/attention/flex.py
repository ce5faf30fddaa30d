"""Shared-prompt attention as one FlexAttention call with a block mask over the packed row (CUDA; it has no backward on
a CPU).

The row is padded to a few sizes, so that the compiled kernel is made once per size; a padding token sees itself only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rondo.attention.layout import Layout


@dataclass(frozen=True, kw_only=True)
class FlexPlan:
    mask: BlockMask
    padding: int  # tokens appended to query, key and value


def flex_plan(layout: Layout, *, multiple: int = 2048) -> FlexPlan:
    total = layout.tokens_T.numel()
    padded = -(-total // multiple) * multiple
    segment, response = _ownership(layout, padded)

    def visible(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        mine = (response[key] == 0) | (response[key] == response[query])
        return (segment[query] == segment[key]) & mine & (key <= query)

    mask = create_block_mask(visible, None, None, padded, padded, device=layout.tokens_T.device)
    return FlexPlan(mask=mask, padding=padded - total)


def flex_attention_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: FlexPlan, scaling: float
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    total = query.shape[2]
    if plan.padding:
        query, key, value = (F.pad(tensor, (0, 0, 0, plan.padding)) for tensor in (query, key, value))
    output: torch.Tensor = _compiled(flex_attention)(
        query, key, value, block_mask=plan.mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output[:, :, :total].transpose(1, 2)


def _ownership(layout: Layout, padded: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per token: its segment (padding: one of its own), and its response (0: the prompt)."""
    segment = list(range(-padded, 0))
    response = [0] * padded
    for start, length in layout.prompts:
        segment[start : start + length] = [start] * length
    for number, span in enumerate(layout.spans, start=1):
        segment[span.start : span.start + span.length] = [span.prompt] * span.length
        response[span.start : span.start + span.length] = [number] * span.length
    device = layout.tokens_T.device
    return torch.tensor(segment, device=device), torch.tensor(response, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
