"""Lengths that were seen -> the groups of a period that was not.

A drawn group is a recorded one, so that a hard prompt's responses stay long together; its responses are drawn from that
group's own. Where the new limit is higher, a response that was cut goes on, and ends at the rate per token at which
others were seen to end in the upper half of the old range.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p

from rondo.plan.records import Setting, Task


@dataclass(frozen=True, slots=True)
class SeenGroup:
    prompt: int  # tokens
    lengths: tuple[int, ...]
    stopped: tuple[bool, ...]
    trained: bool = True
    kept: bool = True  # by the filter


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Every group of the recorded periods."""

    groups: tuple[SeenGroup, ...]
    limit: int  # max_new_tokens

    @property
    def end_rate(self) -> float:
        """Ends per token in the upper half of the range."""
        middle = self.limit // 2
        at_risk = ended = 0
        for group in self.groups:
            for length, stopped in zip(group.lengths, group.stopped, strict=True):
                if length > middle:
                    at_risk += length - middle
                    ended += stopped
        return ended / at_risk if at_risk else 1.0

    def draw(self, setting: Setting, seed: int) -> list[Task]:
        """A period's candidates, until enough of them are kept; the same for the same seed."""
        chance, rate = random.Random(seed), self.end_rate
        if not any(group.kept for group in self.groups):
            return []
        tasks: list[Task] = []
        kept = 0
        while kept < setting.prompts:
            group = chance.choice(self.groups)
            tasks.append(self._task(group, setting, chance, rate))
            kept += group.kept
        return tasks

    def _task(self, group: SeenGroup, setting: Setting, chance: random.Random, rate: float) -> Task:
        places = _places(len(group.lengths), setting.group_size, chance)
        lengths = []
        for place in places:
            length = group.lengths[place]
            if not group.stopped[place] and setting.max_new_tokens > self.limit:
                length += _wait(rate, chance)
            lengths.append(min(length, setting.max_new_tokens))
        return Task(group.prompt, tuple(lengths), group.trained and group.kept)


def _places(seen: int, wanted: int, chance: random.Random) -> Sequence[int]:
    """Each response once as long as there are enough, then again."""
    if wanted <= seen:
        return chance.sample(range(seen), wanted)
    return [*range(seen), *chance.choices(range(seen), k=wanted - seen)]


def _wait(rate: float, chance: random.Random) -> int:
    """Tokens until the end, where each is the last one with this probability."""
    if rate <= 0.0:
        return 1 << 30
    return 1 if rate >= 1.0 else 1 + int(log1p(-chance.random()) / log1p(-rate))
