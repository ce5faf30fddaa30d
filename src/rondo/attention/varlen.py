"""Shared-prompt attention in parts of variable length, with the flash kernels that torch carries.

Three calls, none of which copies a key: prompts over themselves (causal); all responses of a group, as one run of
queries, over their prompt (everything visible); every response over itself (causal). The last two see disjoint keys
for the same queries, so their outputs are merged by their log-sum-exps. The backward pass gives each part the merged
output and log-sum-exp: its share of the gradient is then exact, since a part's weights are exp(score - merged).

The row has all prompts first, so that prompts and responses are slices.

Suffixes: A prompt tokens, B response tokens, T = A + B, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from rondo.attention.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Consecutive sequences: where each starts, and the longest."""

    starts: torch.Tensor  # int32, one more than there are sequences
    longest: int


@dataclass(frozen=True, kw_only=True)
class VarlenPlan:
    prompt_tokens: int  # A
    prompts: Lengths
    groups: Lengths  # the responses of each prompt, taken together
    responses: Lengths
    rows: Lengths | None  # every response stands behind its own prompt: plain causal rows, one call


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has these kernels here."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def varlen_plan(layout: Layout) -> VarlenPlan:
    device = layout.tokens_T.device
    prompt_lengths = [length for _, length in layout.prompts]
    response_lengths = [span.length for span in layout.spans]
    group_lengths = dict.fromkeys((start for start, _ in layout.prompts), 0)  # none behind padding
    for span in layout.spans:
        group_lengths[span.prompt] += span.length
    return VarlenPlan(
        prompt_tokens=sum(prompt_lengths),
        prompts=_lengths(prompt_lengths, device),
        groups=_lengths(list(group_lengths.values()), device),
        responses=_lengths(response_lengths, device),
        rows=_lengths([len(row) for row in layout.rows], device) if layout.rows else None,
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its plan changes with every row
def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: VarlenPlan, scaling: float
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    parts = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    function = _SharedPrompt if plan.rows is None else _Rows
    output: torch.Tensor = function.apply(*parts, plan, scaling)  # type: ignore[no-untyped-call]
    return output.unsqueeze(0)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor, plan: VarlenPlan, scaling: float
    ) -> torch.Tensor:
        assert plan.rows is not None
        out_T, lse_T = _flash(q_T, k_T, v_T, plan.rows, plan.rows, causal=True, scaling=scaling)
        ctx.save_for_backward(q_T, k_T, v_T, out_T, lse_T)
        ctx.rows, ctx.scaling = plan.rows, scaling
        return out_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_T, k_T, v_T, out_T, lse_T = ctx.saved_tensors
        gradients = _flash_backward(
            grad_T.contiguous(), q_T, k_T, v_T, out_T, lse_T, ctx.rows, ctx.rows, True, ctx.scaling
        )
        return (*gradients, None, None)


class _SharedPrompt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_T: torch.Tensor, k_T: torch.Tensor, v_T: torch.Tensor, plan: VarlenPlan, scaling: float
    ) -> torch.Tensor:
        a = plan.prompt_tokens
        q_A, q_B, k_A, k_B, v_A, v_B = q_T[:a], q_T[a:], k_T[:a], k_T[a:], v_T[:a], v_T[a:]
        out_T = torch.empty_like(q_T, memory_format=torch.contiguous_format)
        out_A, lse_A = _flash(q_A, k_A, v_A, plan.prompts, plan.prompts, causal=True, scaling=scaling)
        over_prompt = _flash(q_B, k_A, v_A, plan.groups, plan.prompts, causal=False, scaling=scaling)
        over_self = _flash(q_B, k_B, v_B, plan.responses, plan.responses, causal=True, scaling=scaling)
        out_T[:a] = out_A
        lse_B = _merge(*over_prompt, *over_self, out_T[a:])
        ctx.save_for_backward(q_T, k_T, v_T, out_T, lse_A, lse_B)
        ctx.plan, ctx.scaling = plan, scaling
        return out_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_T, k_T, v_T, out_T, lse_A, lse_B = ctx.saved_tensors
        plan: VarlenPlan = ctx.plan
        a, scaling = plan.prompt_tokens, ctx.scaling
        grad_T = grad_T.contiguous()
        prompt, response = slice(None, a), slice(a, None)

        def part(
            queries: slice, keys: slice, lse: torch.Tensor, q: Lengths, k: Lengths, causal: bool
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return _flash_backward(
                grad_T[queries], q_T[queries], k_T[keys], v_T[keys], out_T[queries], lse, q, k, causal, scaling
            )

        dq_A, dk_A, dv_A = part(prompt, prompt, lse_A, plan.prompts, plan.prompts, True)
        dq_1, dk_1, dv_1 = part(response, prompt, lse_B, plan.groups, plan.prompts, False)
        dq_2, dk_2, dv_2 = part(response, response, lse_B, plan.responses, plan.responses, True)
        return (
            torch.cat([dq_A, dq_1.add_(dq_2)]),
            torch.cat([dk_A.add_(dk_1), dk_2]),
            torch.cat([dv_A.add_(dv_1), dv_2]),
            None,
            None,
        )


def _merge(
    out_1: torch.Tensor, lse_1: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor, into: torch.Tensor
) -> torch.Tensor:
    """Two attentions of the same queries [B, H, D] over disjoint keys as one; returns its log-sum-exp [H, B]."""
    share_BH1 = torch.sigmoid(lse_1 - lse_2).transpose(0, 1).unsqueeze(-1)
    into.copy_(torch.lerp(out_2.float(), out_1.float(), share_BH1))
    return torch.logaddexp(lse_1, lse_2)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    *,
    causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, H, D] and log-sum-exp [H, tokens]."""
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.starts, keys.starts, queries.longest, keys.longest, 0.0, causal, False, scale=scaling
    )
    return output, lse


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: Lengths,
    keys: Lengths,
    causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), queries.starts, keys.starts, queries.longest, keys.longest, 0.0, causal,
        no_dropout, no_dropout.new_empty(0), scale=scaling,
    )  # fmt: skip
    return dq, dk, dv


def _lengths(lengths: Sequence[int], device: torch.device) -> Lengths:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Lengths(starts=starts, longest=max(lengths))
