"""Builds the loader from the config: for a run, and for a replay of its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rondo.config import Config
from rondo.observe.diagnosis import Waits
from rondo.observe.lane import Lane
from rondo.rollout.advantage import whiten
from rondo.stream.loader import Loader, LoaderSettings
from rondo.stream.queue import GroupQueue
from rondo.types import Group


def build_loader(config: Config, queue: GroupQueue, lane: Lane, ranks: int, waits: Waits | None = None) -> Loader:
    algorithm = config.algorithm
    every_group_counts = algorithm.kl.coefficient > 0 or algorithm.entropy_coefficient > 0

    def has_gradient(group: Group) -> bool:
        return every_group_counts or any(group.advantages)

    return Loader(
        queue=queue,
        settings=LoaderSettings(
            groups=config.rollout.prompts_per_period,
            updates=config.schedule.updates_per_period,
            micro_tokens=config.trainer.micro_tokens,
            synchronous=config.schedule.mode == "synchronous",
            prompt_order=config.schedule.order == "prompt",
            filtered=algorithm.filter != "none",
            ranks=ranks,
        ),
        has_gradient=has_gradient,
        lane=lane,
        waits=waits,
        finish=whole_period(config),
    )


def whole_period(config: Config) -> Callable[[Sequence[Group]], list[Group]] | None:
    """What is done to a period's groups, in prompt order, when all are there; None: nothing needs them all."""
    if config.algorithm.name != "reinforce++":
        return None
    return partial(whiten, scale=config.algorithm.scale_advantages)
