"""Builds one rank's trainer from the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rondo.attention.hf import adopt_or_explain
from rondo.config import Config, asset_or_path
from rondo.config.algorithm import AlgorithmConfig
from rondo.errors import ModelError
from rondo.launch.join import device_of, limit_memory
from rondo.observe.lane import Lane
from rondo.rollout.advantage import advantages_of
from rondo.trainer.ensemble import AnyTrainer
from rondo.trainer.layers import COMPILED_MULTIPLE, checkpoint_layers
from rondo.trainer.lora import LoRASettings, add_adapters, base_name, is_adapter
from rondo.trainer.objective import surrogate
from rondo.trainer.objective.base import Objective
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.trainer.optim import LearningRate, adamw
from rondo.trainer.parallel import Alone, Joined, make_mesh
from rondo.trainer.trainer import Trainer, TrainerSettings
from rondo.trainer.tri_model import Placement, TriModel


def build_trainer(
    config: Config,
    lane: Lane,
    *,
    ranks: Alone | Joined | None = None,
    device: torch.device | None = None,
    on_fallback: Callable[[str], None] = lambda sentence: None,
    dtype: torch.dtype | None = None,
) -> Trainer:
    """One rank's, alone or among others. `dtype`: of forward and backward, instead of the configured one."""
    ranks, device = ranks or Alone(), device or device_of(config.trainer.device)
    limit_memory(device, config.trainer.memory_share)
    exact = config.trainer.accumulation == "exact"
    policy, attention = _load(config, device, on_fallback=on_fallback)
    keep_old = config.schedule.updates_per_period > 1
    reference = None
    if config.algorithm.kl.coefficient > 0:
        reference = policy if config.trainer.lora.rank else _load(config, device)[0]
    if lora := config.trainer.lora.rank:
        settings = LoRASettings(
            rank=lora, alpha=config.trainer.lora.alpha, targets=config.trainer.lora.targets, seed=config.run.seed
        )
        add_adapters(policy, settings, keep_old=keep_old)
    if config.trainer.checkpointing:
        checkpoint_layers(policy)
    sharded = ranks.size > 1 and not exact
    model = TriModel(
        policy=policy,
        keep_old=keep_old,
        reference=reference,
        temperature=config.rollout.temperature,
        entropy=config.algorithm.entropy_coefficient > 0,
        placement=Placement(
            dtype=dtype or getattr(torch, config.trainer.dtype),
            mesh=make_mesh(device, ranks.size, config.trainer.shard) if sharded else None,
            offload=config.trainer.offload,
            compiled=config.trainer.compile,
        ),
    )
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
            attention=attention,
            max_grad_norm=config.trainer.max_grad_norm,
            exact=exact,
            hashes=config.journal.hashes,
            reduce_once=config.trainer.reduce == "step",
            multiple=COMPILED_MULTIPLE if config.trainer.compile else 1,
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


def saved_state(policy: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state that a folder of the model holds: tied tensors under each of their names, buffers as they are."""
    named = [(name, parameter) for name, parameter in policy.named_parameters() if not is_adapter(name)]
    of_parameter = {id(parameter): weights[base_name(name)] for name, parameter in named}
    state = policy.state_dict(keep_vars=True)
    return {base_name(name): of_parameter.get(id(held), held) for name, held in state.items() if not is_adapter(name)}


def _load(
    config: Config, device: torch.device, *, on_fallback: Callable[[str], None] = lambda sentence: None
) -> tuple[PreTrainedModel, str]:
    """The model, and how its rows are laid out: as asked for, unless it can only do separate ones."""
    path, attention = config.model.path, config.trainer.attention
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(asset_or_path(path), dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path = {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.eval().to(device)  # eval: dropout would make the trainer's policy another than the engine's
    refusal = adopt_or_explain(model)
    if refusal is None:
        return model, attention
    if attention == "shared-prompt":
        raise ModelError(
            f'model.path = {path} cannot be trained with trainer.attention = "shared-prompt": {refusal}; '
            'set it to "auto" to train separate rows with the model\'s own attention'
        )
    if attention == "auto":
        on_fallback(
            f"prompts are NOT shared: every response is trained in a row of its own, which computes each prompt "
            f"rollout.group_size times. {refusal}"
        )
    return model, "separate"
