"""Only what changed, losslessly: a step at a small learning rate moves few of a model's bf16 numbers.

A tensor's raw words are compared with the last publication's. Each changed word is told by its distance from the one
before it (bytes; 255 means "255 and on") and by its difference as an integer (a byte; -128 means "the next of the wide
ones"): differences wrap, so the new words come back to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_WORD = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = ("gaps", "steps", "wide")
_FAR = 255
_WIDE = -128


@dataclass(frozen=True, kw_only=True)
class Delta:
    gaps: torch.Tensor  # [B] uint8
    steps: torch.Tensor  # [changed words] int8
    wide: torch.Tensor  # [those of -128], as wide as a word

    @property
    def bytes(self) -> int:
        return self.gaps.numel() + self.steps.numel() + self.wide.numel() * self.wide.element_size()


def difference(new: torch.Tensor, old: torch.Tensor) -> Delta:
    """What makes `new` of `old`; both on the CPU, of one dtype and shape."""
    new_words, old_words = words_of(new), words_of(old)
    places = (new_words != old_words).nonzero().squeeze(1)
    steps = new_words[places] - old_words[places]
    far = (steps <= _WIDE) | (steps > 127)
    wide = steps[far]
    steps = steps.masked_fill(far, _WIDE).to(torch.int8)
    gaps = torch.diff(places, prepend=torch.tensor([-1])) - 1  # words skipped before each
    lengths = gaps // _FAR + 1
    ends = torch.cumsum(lengths, 0) - 1
    encoded = torch.full((int(lengths.sum()),), _FAR, dtype=torch.uint8)
    encoded[ends] = (gaps % _FAR).to(torch.uint8)
    return Delta(gaps=encoded, steps=steps, wide=wide)


def apply(delta: Delta, held: torch.Tensor) -> None:
    """Turn `held`, the last publication's tensor, into the new one."""
    words = words_of(held)
    ends = delta.gaps != _FAR
    places = torch.cumsum(delta.gaps.to(torch.int64), 0)[ends] + torch.arange(int(ends.sum()), device=words.device)
    far = delta.steps == _WIDE
    counts = (len(places), int(far.sum()))
    if counts != (delta.steps.numel(), delta.wide.numel()) or (len(places) and int(places[-1]) >= words.numel()):
        raise ValueError(f"a delta of {delta.steps.numel()} words at {len(places)} places of {words.numel()}")
    steps = delta.steps.to(words.dtype)
    steps[far] = delta.wide
    words[places] += steps


def named_parts(name: str, delta: Delta) -> dict[str, torch.Tensor]:
    """A delta as it is written into a file: three tensors called NAME|PART."""
    return {f"{name}|{part}": getattr(delta, part) for part in _PARTS}


def from_parts(name: str, tensors: Mapping[str, torch.Tensor]) -> Delta:
    gaps, steps, wide = (tensors[f"{name}|{part}"] for part in _PARTS)
    return Delta(gaps=gaps, steps=steps, wide=wide)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a contiguous tensor's raw words."""
    return tensor.detach().view(-1).view(_WORD[tensor.element_size()])
