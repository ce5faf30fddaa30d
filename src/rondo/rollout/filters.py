"""Dynamic sampling (DAPO): which of a period's candidates are trained. A small state machine, without any waiting.

Candidates stand in prompt order; each is UNRESOLVED until it is scored, then KEPT (it qualifies) or DROPPED. The period
trains the first `wanted` that qualify *in prompt order*: by order of arrival, short answers would be favoured. So

    certain    fewer than `wanted` of the candidates before it are kept or unresolved: whatever those turn out to be,
               the period needs this one (trained if it is kept, merely seen if it is dropped)
    complete   `wanted` kept ones are certain, or the limit is reached and nothing is unresolved (then it is short)

`asked` says how many candidates are to be generated. It grows, in order, only when too few can still qualify. What is
kept does not depend on the order of arrival, nor on `oversample`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    oversample: float  # times the wanted groups, at first
    limit: int  # candidates per period
    in_order: bool  # hand out in prompt order, each with its place; else as soon as it is certain


@dataclass(frozen=True, kw_only=True)
class Settled:
    """A candidate that the period is certain to need."""

    index: int
    kept: bool
    place: int | None  # among the kept, in prompt order; None: dropped, or certain before its place was


class Selection:
    """One period's candidates."""

    def __init__(self, *, wanted: int, settings: FilterSettings) -> None:
        self.wanted = wanted
        self.asked = 0  # candidates 0 .. asked - 1 are to be generated
        self.kept = 0  # settled ones
        self.used = 0  # candidates up to the last one that is needed; final when complete
        self._settings = settings
        self._verdicts: dict[int, bool] = {}  # no entry: unresolved
        self._settled: set[int] = set()
        self._extend()

    @property
    def complete(self) -> bool:
        return self.kept == self.wanted or len(self._verdicts) == self._settings.limit

    @property
    def short(self) -> bool:
        return self.complete and self.kept < self.wanted

    def resolve(self, index: int, qualifies: bool) -> list[Settled]:
        """This candidate is scored; those that are certain from now on, in prompt order."""
        assert index < self.asked, index
        assert index not in self._verdicts, index
        self._verdicts[index] = qualifies
        found = self._certain()
        self._settled |= {settled.index for settled in found}
        self.kept += sum(settled.kept for settled in found)
        self.used = max(self._settled, default=-1) + 1
        self._extend()
        return found

    def _certain(self) -> list[Settled]:
        found = []
        kept = unresolved = 0
        for index in range(self.asked):
            if kept + unresolved >= self.wanted or (unresolved and self._settings.in_order):
                break
            qualifies = self._verdicts.get(index)
            if qualifies is None:
                unresolved += 1
                continue
            if index not in self._settled:
                place = kept if qualifies and self._settings.in_order else None
                found.append(Settled(index=index, kept=qualifies, place=place))
            kept += qualifies
        return found

    def _extend(self) -> None:
        possible = self.asked - len(self._verdicts) + sum(self._verdicts.values())
        if possible < self.wanted:
            more = math.ceil(self._settings.oversample * (self.wanted - possible))
            self.asked = min(self._settings.limit, self.asked + more)


def nonzero_spread(rewards: Sequence[float]) -> bool:
    """Rewards that are all equal give no advantage to anyone."""
    return min(rewards) != max(rewards)
