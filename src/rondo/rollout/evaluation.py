"""Held-out reward: the same engines, version check and rewards as training, on prompts that are never trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rondo.observe.lane import Lane
from rondo.rollout.producer import Producer
from rondo.types import Prompt


class Evaluation:
    def __init__(
        self,
        *,
        producer: Producer,
        prompts: Sequence[Prompt],
        samples: int,
        every: int,
        total: int,
        lane: Lane,
        on_result: Callable[[int, float], None],
    ) -> None:
        self._producer = producer
        self._prompts = prompts
        self._samples = samples
        self._every = every
        self._total = total
        self._lane = lane
        self._on_result = on_result

    def evaluate(self, version: int) -> None:
        """Before the first period, after the last, and every so many in between."""
        if not self._prompts or not self._due(version):
            return
        with self._lane.doing("evaluating"):
            rewards = self._producer.evaluate(version, self._prompts, self._samples)
        self._on_result(version, sum(rewards) / len(rewards))

    def _due(self, version: int) -> bool:
        return version in (0, self._total) or (self._every > 0 and version % self._every == 0)
