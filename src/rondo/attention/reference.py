"""The truth: the visibility rule written as a dense mask, and attention by the textbook.

Slow and memory-hungry on purpose; every fast path is tested against it.
"""

from __future__ import annotations

import torch

from rondo.attention.layout import Layout


def visible(layout: Layout) -> torch.Tensor:
    """[T, T] booleans: may the row's token (query) see the column's token (key)?"""
    total = layout.tokens_T.numel()
    mask = torch.zeros(total, total, dtype=torch.bool)
    for start, length in layout.prompts:
        for query in range(start, start + length):
            mask[query, start : query + 1] = True
    for span in layout.spans:
        for query in range(span.start, span.start + span.length):
            mask[query, span.prompt : span.prompt + span.prompt_length] = True
            mask[query, span.start : query + 1] = True
    return mask


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: Layout, scaling: float
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    repeat = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeat, dim=1)
    value = value.repeat_interleave(repeat, dim=1)
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores.masked_fill(~visible(plan).to(scores.device), float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)
