"""Builds one rank's trainer from the config."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rondo.attention.hf import adopt
from rondo.config import Config, asset_or_path
from rondo.config.algorithm import AlgorithmConfig
from rondo.errors import ModelError
from rondo.launch.join import device_of
from rondo.observe.lane import Lane
from rondo.rollout.advantage import advantages_of
from rondo.trainer.ensemble import AnyTrainer
from rondo.trainer.layers import checkpoint_layers
from rondo.trainer.objective import surrogate
from rondo.trainer.objective.base import Objective
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.trainer.optim import LearningRate, adamw
from rondo.trainer.parallel import Alone, Joined, make_mesh
from rondo.trainer.trainer import Trainer, TrainerSettings
from rondo.trainer.tri_model import TriModel


def build_trainer(
    config: Config, lane: Lane, *, ranks: Alone | Joined | None = None, device: torch.device | None = None
) -> Trainer:
    """One rank's, alone or among others."""
    ranks, device = ranks or Alone(), device or device_of(config.trainer.device)
    exact = config.trainer.accumulation == "exact"
    kl = config.algorithm.kl
    policy = _load(config.model.path, device)
    if config.trainer.checkpointing:
        checkpoint_layers(policy)
    model = TriModel(
        policy=policy,
        keep_old=config.schedule.updates_per_period > 1,
        reference=_load(config.model.path, device) if kl.coefficient > 0 else None,
        temperature=config.rollout.temperature,
        entropy=config.algorithm.entropy_coefficient > 0,
    )
    if ranks.size > 1 and not exact:
        model.shard(make_mesh(device, ranks.size, config.trainer.shard))
    updates = config.schedule.updates_per_period
    return Trainer(
        model=model,
        objective=objective(config.algorithm),
        reward_kl=reward_kl(config.algorithm),
        optimizer=adamw(model.named_parameters(), weight_decay=config.trainer.weight_decay, betas=config.trainer.betas),
        learning_rate=LearningRate(
            peak=config.trainer.learning_rate,
            warmup=config.trainer.warmup_periods * updates,
            total=config.schedule.periods * updates,
            decay=config.trainer.decay,
        ),
        settings=TrainerSettings(
            normalise=config.algorithm.normalise,
            constant=config.rollout.max_new_tokens,
            attention=config.trainer.attention,
            max_grad_norm=config.trainer.max_grad_norm,
            exact=exact,
            hashes=config.journal.hashes,
        ),
        lane=lane,
        device=device,
        ranks=ranks,
    )


def objective(algorithm: AlgorithmConfig) -> Objective:
    return Objective(
        surrogate=surrogate(algorithm.name, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high),
        kl_coefficient=algorithm.kl.coefficient if algorithm.kl.place == "loss" else 0.0,
        kl_estimator=algorithm.kl.estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
        correction_cap=algorithm.correction_cap,
    )


def reward_kl(algorithm: AlgorithmConfig) -> RewardKL | None:
    if not algorithm.kl.coefficient or algorithm.kl.place == "loss":
        return None
    return RewardKL(
        coefficient=algorithm.kl.coefficient,
        estimator=algorithm.kl.estimator,
        advantages=advantages_of(algorithm.name, scale=algorithm.scale_advantages),
    )


def published_weights(trainer: AnyTrainer, dtype: str) -> dict[str, torch.Tensor]:
    target = getattr(torch, dtype)
    return {name: tensor.to(dtype=target, device="cpu").contiguous() for name, tensor in trainer.weights()}


def _load(path: str, device: torch.device) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(asset_or_path(path), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path = {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    adopt(model.eval())  # eval: dropout would make the trainer's policy another than the engine's
    return model.to(device)
