"""LoRA through peft: one set of base weights for policy, old policy and reference.

peft puts its layers into the model in place, so the model object, its forward and its attention stay what they were.
The policy wears the adapters that are trained, the old policy the period's first ones (a frozen set beside them), and
the reference none. Which are worn is set for the length of one forward: peft's own switches would also turn gradients
on and off, between a forward and its backward.

The only module that imports peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from rondo.errors import ConfigError
from rondo.trainer.layers import decoder_layers
from rondo.trainer.parallel import own, whole

POLICY, OLD = "policy", "old"


@dataclass(frozen=True, kw_only=True)
class LoRASettings:
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()  # last names of linear layers; empty: all linear layers of the decoder's blocks
    seed: int = 0  # of the A matrices; the B matrices start at zero


def add_adapters(model: PreTrainedModel, settings: LoRASettings, *, keep_old: bool) -> None:
    """Freezes the model and puts trained adapters into it, and beside them, if asked for, the old policy's."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("trainer.lora.rank needs peft: pip install 'rondo-rl[lora]'") from None

    model.requires_grad_(False)
    for name in (OLD, POLICY) if keep_old else (POLICY,):
        config = LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=_targets(model, settings)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)  # every rank draws the same
            inject_adapter_in_model(config, model, adapter_name=name)
        model.__dict__.pop("peft_config", None)  # peft's own note, which makes it warn of a second set
    for layer in adapted(model):
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "base_layer":
                module.weight.data = module.weight.data.to(_wide(module.weight.dtype))
                module.requires_grad_(name.endswith(f".{POLICY}"))
        layer._active_adapter = [POLICY]
    model.eval()
    refresh_old(model)


def adapted(model: torch.nn.Module) -> list[Any]:
    """The layers that hold adapters; none: the model is trained whole."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


@contextmanager
def wearing(model: torch.nn.Module, adapters: str | None) -> Iterator[None]:
    """Inside, the model computes with these adapters, or with none; outside, with the policy's."""
    layers = adapted(model)
    for layer in layers:
        layer._active_adapter, layer._disable_adapters = [adapters], adapters is None
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [POLICY], False


def refresh_old(model: torch.nn.Module) -> None:
    """The policy's adapters become the old policy's, where there is one."""
    with torch.no_grad():
        for layer in adapted(model):
            for matrices in (layer.lora_A, layer.lora_B):
                if OLD in matrices:
                    own(matrices[OLD].weight).copy_(own(matrices[POLICY].weight))


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What an engine without adapters needs: base + scale B A in float32 at least, under the base model's names.

    Tensors are whole, one at a time, and nothing is changed in place. Every rank must go through all of them.
    """
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        base = whole(parameter.detach())
        if name.endswith(".base_layer.weight"):
            layer: Any = layers[name.removesuffix(".base_layer.weight")]
            up, down = (whole(matrices[POLICY].weight.detach()) for matrices in (layer.lora_B, layer.lora_A))
            wide = _wide(torch.promote_types(base.dtype, up.dtype))
            base = base.to(wide) + layer.scaling[POLICY] * (up.to(wide) @ down.to(wide))
        yield base_name(name), base


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """A parameter's name in the model as it was before adapters were put into it."""
    return name.replace(".base_layer.", ".")


def _targets(model: PreTrainedModel, settings: LoRASettings) -> list[str]:
    """Full names of linear layers, so that peft guesses nothing."""
    names = {module: name for name, module in model.named_modules()}
    found = []
    for block in decoder_layers(model):
        for inner, module in block.named_modules():
            last = inner.rsplit(".", 1)[-1]
            if last == "base_layer":  # adapters are in it already: the layer around it
                inner = inner.removesuffix(".base_layer")
                last = inner.rsplit(".", 1)[-1]
            if "lora_" in inner or not isinstance(module, torch.nn.Linear):
                continue
            if not settings.targets or last in settings.targets:
                found.append(f"{names[block]}.{inner}")
    missing = set(settings.targets) - {name.rsplit(".", 1)[-1] for name in found}
    if missing or not found:
        raise ConfigError(
            f"trainer.lora.targets names {', '.join(sorted(missing)) or 'nothing'}, which {type(model).__name__} has "
            "no linear layer for: leave it empty to adapt all of them"
        )
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
