"""The producer's settings and the reward workers, from the config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rondo.config import Config
from rondo.errors import ConfigError
from rondo.rewards.runner import RewardRunner
from rondo.rollout.advantage import advantages_of
from rondo.rollout.filters import FilterSettings
from rondo.rollout.producer import ProducerSettings
from rondo.types import Sampling


def build_scorer(config: Config, folder: Path, *, warn: Callable[[str], None]) -> RewardRunner:
    rewards = config.rewards
    return RewardRunner(
        functions=rewards.functions,
        weights=rewards.weights or (1.0,) * len(rewards.functions),
        seconds=rewards.seconds,
        on_error=rewards.on_error,
        workers=rewards.workers,
        log=folder / "logs" / "rewards.log",
        evidence=folder / "evidence",
        memory_mb=rewards.memory_mb,
        on_retry=warn,
    )


def producer_settings(config: Config, policy: PreTrainedModel, tokenizer: Any) -> ProducerSettings:
    rollout = config.rollout
    stop = rollout.stop_token_ids or _eos_ids(policy, tokenizer)
    if not stop:
        raise ConfigError("the model names no end-of-sequence token: set rollout.stop_token_ids")
    return ProducerSettings(
        run_seed=config.run.seed,
        group_size=rollout.group_size,
        advantages=advantages_of(config.algorithm.name, scale=config.algorithm.scale_advantages),
        overlong_buffer=round(config.algorithm.overlong_buffer * rollout.max_new_tokens),
        filter=_filter(config),
        sampling=Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=rollout.max_new_tokens,
            stop_token_ids=stop,
        ),
    )


def _filter(config: Config) -> FilterSettings | None:
    algorithm, schedule = config.algorithm, config.schedule
    if algorithm.filter == "none":
        return None
    return FilterSettings(
        oversample=algorithm.oversample,
        limit=algorithm.max_candidates or 10 * config.rollout.prompts_per_period,
        in_order=schedule.order == "prompt" or schedule.updates_per_period > 1,
    )


def _eos_ids(policy: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    configured = policy.generation_config.eos_token_id if policy.generation_config else None
    if configured is None:
        configured = tokenizer.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return tuple(int(token) for token in ids if token is not None)
