"""Compute in a narrow dtype with float32 masters, on a rank that holds the whole model.

The working copy is what runs: forward and backward are all narrow, residual stream and attention included. What it
gathers in one backward pass is added to the master's float32 gradient tensor by tensor, as soon as it is whole, and
freed. Sums over micro-batches, clipping and the optimizer only ever see the masters. Sharded models get the same from
FSDP2's mixed precision (`parallel.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel


class WorkingCopy:
    def __init__(self, masters: PreTrainedModel, dtype: torch.dtype) -> None:
        narrow_frozen(masters, dtype)
        shared = {id(parameter): parameter for parameter in masters.parameters() if not parameter.requires_grad}
        self.model = copy.deepcopy(masters, shared)
        self._pairs = [
            (narrow, master)
            for narrow, master in zip(self.model.parameters(), masters.parameters(), strict=True)
            if narrow is not master
        ]
        for narrow, master in self._pairs:
            narrow.data = narrow.data.to(dtype)
            narrow.register_post_accumulate_grad_hook(_hand_over(master))

    def refresh(self) -> None:
        """After the masters have moved."""
        with torch.no_grad():
            for narrow, master in self._pairs:
                narrow.copy_(master)


def narrow_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What is never trained needs no master. Not `model.to`: buffers keep their precision, as on sharded models."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _hand_over(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    def add(narrow: torch.Tensor) -> None:
        assert narrow.grad is not None
        if master.grad is None:
            master.grad = narrow.grad.to(master.dtype)
        else:
            master.grad += narrow.grad
        narrow.grad = None

    return add
