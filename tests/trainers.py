"""A trainer over a tiny model, and random groups to feed it."""

from __future__ import annotations

import random

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from rondo.attention.hf import adopt
from rondo.observe.lane import Lane
from rondo.stream.packing import packs, parts_of
from rondo.trainer.lora import POLICY, LoRASettings, adapted, add_adapters
from rondo.trainer.objective import surrogate
from rondo.trainer.objective.base import Objective
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.trainer.optim import LearningRate, adamw
from rondo.trainer.parallel import Ranks
from rondo.trainer.trainer import Trainer, TrainerSettings
from rondo.trainer.tri_model import Placement, TriModel
from rondo.types import Group, MicroBatch
from tests.conftest import make_group
from tests.models import VOCABULARY, tiny_model


def make_trainer(
    *,
    dtype: torch.dtype = torch.float64,
    normalise: str = "sequences",
    attention: str = "shared-prompt",
    kl: float = 0.0,
    estimator: str = "k3",
    keep_old: bool = False,
    temperature: float = 1.0,
    max_grad_norm: float = 1e9,
    algorithm: str = "grpo",
    clip: tuple[float, float] = (0.2, 0.2),
    entropy: float = 0.0,
    correction_cap: float = 0.0,
    reward_kl: RewardKL | None = None,
    exact: bool = False,
    ranks: Ranks | None = None,
    mesh: DeviceMesh | None = None,
    compute: torch.dtype | None = None,
    lora: LoRASettings | None = None,
    offload: bool = False,
    compiled: bool = False,
    multiple: int = 1,
    reduce_once: bool = False,
) -> Trainer:
    policy, reference = tiny_model(dtype=dtype), tiny_model(dtype=dtype, seed=1)
    for model in (policy, reference):
        adopt(model)
    if lora:
        add_adapters(policy, lora, keep_old=keep_old)
        scatter_adapters(policy)
        reference = policy
    tri = TriModel(
        policy=policy,
        keep_old=keep_old,
        reference=reference if kl or reward_kl else None,
        temperature=temperature,
        entropy=entropy > 0,
        placement=Placement(dtype=compute, mesh=mesh, offload=offload, compiled=compiled),
    )
    return Trainer(
        model=tri,
        objective=Objective(
            surrogate=surrogate(algorithm, clip_low=clip[0], clip_high=clip[1]),
            kl_coefficient=kl,
            kl_estimator=estimator,
            entropy_coefficient=entropy,
            correction_cap=correction_cap,
        ),
        reward_kl=reward_kl,
        optimizer=adamw(tri.named_parameters(), weight_decay=0.1, betas=(0.9, 0.999)),
        learning_rate=LearningRate(peak=1e-2, total=10),
        settings=TrainerSettings(
            normalise=normalise,
            constant=16,
            attention=attention,
            max_grad_norm=max_grad_norm,
            exact=exact,
            multiple=multiple,
            reduce_once=reduce_once,
        ),
        lane=Lane(),
        device=torch.device("cpu"),
        ranks=ranks,
    )


def scatter_adapters(model: PreTrainedModel) -> None:
    """Adapters as after some training: B is not zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in adapted(model):
            layer.lora_B[POLICY].weight.copy_(torch.randn_like(layer.lora_B[POLICY].weight) * 0.3)


def random_groups(count: int, *, seed: int = 0, size: int = 4) -> list[Group]:
    draw = random.Random(seed)

    def ids(longest: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]

    return [
        make_group(
            index=index,
            prompt=ids(8),
            responses=[ids(7) for _ in range(size)],
            advantages=[draw.uniform(-2, 2) for _ in range(size)],
        )
        for index in range(count)
    ]


def micros_of(groups: list[Group], budget: int) -> list[MicroBatch]:
    return [
        MicroBatch(parts=pack) for pack in packs((part for group in groups for part in parts_of(group, budget)), budget)
    ]


def gradient_after(trainer: Trainer, micros: list[MicroBatch]) -> list[torch.Tensor]:
    """What `step` would divide and apply."""
    for micro in micros:
        trainer.accumulate(micro)
    return [gradient.clone() for gradient in trainer.gradients()]
