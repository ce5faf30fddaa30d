"""Shared-prompt attention in two kinds of pieces, with SDPA: prompts causally, then every response over its prompt
and itself.

Pieces of like size are batched: a bucket is a padded batch of pieces, each a list of query tokens and a list of
key tokens of the row. A dense mask over the row would spend most of its work on pairs that never see each other.

Suffixes: B pieces of a bucket, Q its longest query, K its longest key list, T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rondo.attention.layout import Layout

WASTE = 1.3  # padded over useful work that a bucket may reach before another one is opened
SMALL = 1 << 14  # query-key pairs that are not worth a bucket of their own


@dataclass(frozen=True, kw_only=True)
class Bucket:
    queries_BQ: torch.Tensor  # indices into the row; padding repeats token 0
    keys_BK: torch.Tensor
    bias_B1QK: torch.Tensor | None  # 0 where visible, -inf elsewhere; None: causal


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """How one row is cut; made once per micro-batch, used by every layer."""

    buckets: tuple[Bucket, ...]
    restore_T: torch.Tensor  # where each token's output lies among the buckets' padded outputs


@dataclass(frozen=True, kw_only=True)
class _Piece:
    queries: range
    prefix: range  # keys that every query sees, before its own

    @property
    def cost(self) -> int:
        return len(self.queries) * (len(self.prefix) + len(self.queries))


def split_plan(layout: Layout, dtype: torch.dtype) -> SplitPlan:
    device = layout.tokens_T.device
    buckets: list[Bucket] = []
    restore = [0] * layout.tokens_T.numel()
    offset = 0
    for pieces in _pieces(layout):
        width = max(len(piece.queries) for piece in pieces)
        for number, piece in enumerate(pieces):
            first = offset + number * width
            restore[piece.queries.start : piece.queries.stop] = range(first, first + len(piece.queries))
        offset += width * len(pieces)
        buckets.append(_bucket(pieces, width, dtype, device))
    return SplitPlan(buckets=tuple(buckets), restore_T=torch.tensor(restore, device=device))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its plan changes with every row
def split_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: SplitPlan, scaling: float
) -> torch.Tensor:
    """query [1, H, T, D], key and value [1, KV, T, D] -> [1, T, H, D]."""
    query_THD, key_TKD, value_TKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for bucket in plan.buckets:
        output = F.scaled_dot_product_attention(
            query_THD[bucket.queries_BQ].transpose(1, 2),
            key_TKD[bucket.keys_BK].transpose(1, 2),
            value_TKD[bucket.keys_BK].transpose(1, 2),
            attn_mask=bucket.bias_B1QK,
            is_causal=bucket.bias_B1QK is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[plan.restore_T].unsqueeze(0)


def _pieces(layout: Layout) -> list[list[_Piece]]:
    """Plain causal rows where prompts are not shared; else prompts and responses apart. Batched by size."""
    if layout.rows:
        return _alike([_Piece(queries=row, prefix=range(0)) for row in layout.rows])
    prompts = [_Piece(queries=range(start, start + length), prefix=range(0)) for start, length in layout.prompts]
    responses = [
        _Piece(
            queries=range(span.start, span.start + span.length),
            prefix=range(span.prompt, span.prompt + span.prompt_length),
        )
        for span in layout.spans
    ]
    return [*_alike(prompts), *_alike(responses)]


def _alike(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Pieces sorted by size and cut where padding them to the longest would waste too much."""
    ordered = sorted(pieces, key=lambda piece: (len(piece.queries), len(piece.prefix)), reverse=True)
    buckets: list[list[_Piece]] = []
    useful = longest_query = longest_prefix = 0
    for piece in ordered:
        wider = max(longest_prefix, len(piece.prefix))
        if buckets:
            padded = (len(buckets[-1]) + 1) * longest_query * (longest_query + wider)
            if padded <= WASTE * (useful + piece.cost) + SMALL:
                buckets[-1].append(piece)
                useful, longest_prefix = useful + piece.cost, wider
                continue
        buckets.append([piece])
        useful, longest_query, longest_prefix = piece.cost, len(piece.queries), len(piece.prefix)
    return buckets


def _bucket(pieces: Sequence[_Piece], width: int, dtype: torch.dtype, device: torch.device) -> Bucket:
    prefixes = [len(piece.prefix) for piece in pieces]
    queries = torch.tensor([_padded(list(piece.queries), width) for piece in pieces], device=device)
    if not any(prefixes):  # padding follows every real token, so causality hides it
        return Bucket(queries_BQ=queries, keys_BK=queries, bias_B1QK=None)
    depth = max(len(piece.prefix) + len(piece.queries) for piece in pieces)
    keys = torch.tensor([_padded([*piece.prefix, *piece.queries], depth) for piece in pieces], device=device)
    last_seen_BQ1 = torch.tensor(prefixes, device=device)[:, None, None] + torch.arange(width, device=device)[:, None]
    hidden_BQK = torch.arange(depth, device=device) > last_seen_BQ1
    bias = torch.zeros(hidden_BQK.shape, dtype=dtype, device=device).masked_fill_(hidden_BQK, float("-inf"))
    return Bucket(queries_BQ=queries, keys_BK=keys, bias_B1QK=bias.unsqueeze(1))


def _padded(indices: list[int], length: int) -> list[int]:
    return indices + [0] * (length - len(indices))
