"""Keys and values of the slots, and the attention that reads and writes them.

The attention is plugged into transformers by name (`ATTENTION`). A forward pass hands it a `Prefill` or a
`Decode` through the keyword `rondo_batch`; no mask function is registered, so transformers builds no mask.

Shapes: R rows decoded, H key/value heads, Q query heads for each of them, K keys, D head dimension, P prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rondo.errors import ModelError

ATTENTION = "rondo_slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """A pass over whole prompts, right-padded to one length; collects their keys and values."""

    max_length: int  # of any sequence: a sliding window at least as wide changes nothing
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # [B, H, P, D] each


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptState:
    """What a prompt left behind, kept until the last of its samples has a slot."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # [H, P, D] each
    logits: torch.Tensor  # [V], at the last prompt token


class KeyValues:
    """Buffers of [slots * H, length, D] per layer, zero where nothing was written.

    Zero, not empty: masked keys get weight 0, and 0 times whatever memory held may be NaN.
    """

    def __init__(self, *, like: PromptState, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self.layers = [
            tuple(part.new_zeros(slots * part.shape[0], length, part.shape[2]) for part in layer)
            for layer in like.layers
        ]

    def grow(self, length: int) -> None:
        """Room for `length` tokens. Doubles, so that the copies amortise."""
        if length <= self.length:
            return
        self.length = max(length, 2 * self.length)
        self.layers = [
            tuple(F.pad(part, (0, 0, 0, self.length - part.shape[1])) for part in layer) for layer in self.layers
        ]

    def fill(self, rows: Sequence[int], prompt: PromptState) -> None:
        for first, last in _runs(rows):
            for layer, parts in zip(self.layers, prompt.layers, strict=True):
                for target, part in zip(layer, parts, strict=True):
                    heads, length, _ = part.shape
                    by_slot = target.view(self.slots, heads, self.length, -1)
                    by_slot[first:last, :, :length] = part

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for part in layer:
                by_slot = part.view(self.slots, -1, self.length, part.shape[-1])
                by_slot[target, :, :length] = by_slot[source, :, :length]

    def clear(self) -> None:
        for layer in self.layers:
            for part in layer:
                part.zero_()


class Decode:
    """A pass over the newest token of the first R slots."""

    def __init__(self, cache: KeyValues, positions_R: torch.Tensor, key_length: int, dtype: torch.dtype) -> None:
        self.cache = cache
        self.key_length = key_length
        self._positions_R = positions_R
        keys_K = torch.arange(key_length, device=positions_R.device)
        hidden_RK = keys_K > positions_R.unsqueeze(-1)
        self._mask_RK = torch.zeros(hidden_RK.shape, dtype=dtype, device=positions_R.device)
        self._mask_RK.masked_fill_(hidden_RK, float("-inf"))
        self._by_heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def geometry(self, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row writes in a buffer seen as [slots * H * length, D]; the mask as [R * H, 1, K]."""
        if heads not in self._by_heads:
            first_RH = torch.arange(len(self._positions_R) * heads, device=self._positions_R.device)
            places_RH = first_RH * self.cache.length + self._positions_R.repeat_interleave(heads)
            self._by_heads[heads] = (places_RH, self._mask_RK.repeat_interleave(heads, 0).unsqueeze(1))
        return self._by_heads[heads]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rondo_batch: Prefill | Decode | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention call: query [B, H * Q, T, D] -> [B, T, H * Q, D]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(rondo_batch, Decode):
        return _decode(layer, query, key, value, scale, rondo_batch), None
    if rondo_batch is None:
        raise ModelError("does not pass keywords on to its attention")
    _refuse_what_is_ignored(kwargs, rondo_batch.max_length)
    rondo_batch.layers[layer] = (key, value)
    shared = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shared)
    return out.transpose(1, 2), None


def _decode(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, batch: Decode
) -> torch.Tensor:
    rows, heads = key.shape[:2]
    places_RH, mask_RH1K = batch.geometry(heads)
    keys, values = batch.cache.layers[layer]
    keys.view(-1, key.shape[-1]).index_copy_(0, places_RH, key.reshape(rows * heads, -1))
    values.view(-1, value.shape[-1]).index_copy_(0, places_RH, value.reshape(rows * heads, -1))
    # Query heads that share a key head are rows of one product: no copy of the keys. For the short rows of
    # small models two batched products are faster on a CPU than the fused kernel.
    query_RHQD = (query * scale).reshape(rows * heads, -1, query.shape[-1])
    keys_RHKD = keys[: rows * heads, : batch.key_length]
    scores_RHQK = torch.bmm(query_RHQD, keys_RHKD.transpose(1, 2)).add_(mask_RH1K)
    weights_RHQK = scores_RHQK.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights_RHQK, values[: rows * heads, : batch.key_length]).view(rows, 1, -1, value.shape[-1])


def _refuse_what_is_ignored(kwargs: dict[str, Any], max_length: int) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and window < max_length:
        raise ModelError(f"attends in a sliding window of {window}: set max_model_len to {window} or less")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"uses {name} in its attention")


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive rows as [first, last) pairs: fewer, larger copies."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


AttentionInterface.register(ATTENTION, slot_attention)
