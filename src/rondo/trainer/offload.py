"""Models that live on the host and come to the device for their forward alone, layer by layer.

For the old policy and the reference: they have no gradient and no optimizer, so between two forwards nobody looks at
them. Of the decoder's layers only one is on the device at a time; what lies around them (embeddings, head) stays for
the length of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Offloaded:
    """Moves one module's own parameters in and out. Between forwards they are the host's tensors."""

    def __init__(self, module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        self.visits = 0
        self._parameters = list(parameters)
        self._device = device
        pin = torch.accelerator.is_available() and device.type != "cpu"
        self._homes = [_at_home(parameter.data, pin=pin) for parameter in self._parameters]
        self._leave()
        module.register_forward_pre_hook(self._come)
        module.register_forward_hook(self._leave, always_call=True)

    def _come(self, *_: Any) -> None:
        self.visits += 1
        for parameter, home in zip(self._parameters, self._homes, strict=True):
            parameter.data = home.to(self._device, non_blocking=True, copy=True)

    def _leave(self, *_: Any) -> None:
        for parameter, home in zip(self._parameters, self._homes, strict=True):
            parameter.data = home


def offload(root: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device) -> list[Offloaded]:
    """The model under `root` goes to the host; its buffers, small and needed everywhere, stay on the device."""
    inner = {parameter for layer in layers for parameter in layer.parameters()}
    around = [parameter for parameter in root.parameters() if parameter not in inner]
    moved = [Offloaded(layer, list(layer.parameters()), device) for layer in layers]
    return [Offloaded(root, around, device), *moved]


def _at_home(tensor: torch.Tensor, *, pin: bool) -> torch.Tensor:
    held = tensor.to("cpu")
    return held.pin_memory() if pin else held
