"""What is done to a model's decoder layers to save time or memory. Whatever the architecture calls them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

COMPILED_MULTIPLE = 128  # rows of compiled layers: few sizes, all of them good for the kernels; under 1 % at 16k tokens


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The repeated blocks, as transformers names them for sharding."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: PreTrainedModel) -> None:
    """Fuse what lies between the products and the attention. One compilation serves all layers and all lengths."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only the layers' inputs; compute the rest again in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in decoder_layers(model):
        layer.training = True  # transformers asks for it; not `train()`, which would switch dropout on below
