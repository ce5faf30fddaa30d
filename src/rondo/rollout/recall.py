"""What an interrupted run had already settled of a period: taken from its journal instead of being generated again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from rondo.rollout.journal import RecordedPeriod
from rondo.rollout.seeds import group_seed
from rondo.types import Group, Prompt


class Recalled:
    """Empty unless a run is resumed inside a period. Asked by the producer, for every group once."""

    def __init__(self) -> None:
        self._period = -1
        self._groups: dict[int, tuple[Group, bool]] = {}

    def hold(self, interrupted: RecordedPeriod) -> None:
        self._period = interrupted.period
        self._groups = {group.index: (group, kept) for group, kept in interrupted.settled}

    def __call__(self, period: int, index: int, seed: int, prompt: Prompt, /) -> tuple[Group, bool] | None:
        if period != self._period or index not in self._groups:
            return None
        group, kept = self._groups.pop(index)
        assert (group.seed, group.prompt.token_ids) == (seed, prompt.token_ids), index
        now = time.monotonic()  # the recorded times are of another process's clock
        return dataclasses.replace(group, prompt=prompt, asked_at=now, answered_at=now, scored_at=now), kept


def still_asked_for(
    interrupted: RecordedPeriod, *, prompts: Callable[[int], Prompt], run_seed: int, group_size: int
) -> RecordedPeriod:
    """The period with those of its groups that this run would ask for too: the same prompts, seeds and sample counts,
    of the period's own version."""

    def same(group: Group) -> bool:
        prompt = prompts(group.index)
        return (
            (group.prompt.ordinal, group.prompt.token_ids) == (prompt.ordinal, prompt.token_ids)
            and group.seed == group_seed(run_seed, interrupted.period, prompt.ordinal)
            and group.answer.version == (interrupted.period, interrupted.period)
            and len(group.answer.responses) == group_size
        )

    return dataclasses.replace(
        interrupted,
        groups=tuple(filter(same, interrupted.groups)),
        filtered=tuple(filter(same, interrupted.filtered)),
    )
