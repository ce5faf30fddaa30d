"""Exactly once, by name: what became of every (prompt, sample) of a period.

    asked --answered--> answered --settled--> trained, or left out by the filter
    reused (from the journal of an interrupted run) --settled--> the same
    whatever was asked or reused beyond the last prompt that the period needed is unneeded

A request that is sent again is the same sample, by seed: it is asked once and retried. Each step happens once per
prompt, or the run stops. The producer's thread tells; `balance` is asked when a period is over.
"""

from __future__ import annotations

from collections.abc import Mapping

from rondo.errors import OnPolicyError


class SampleAccount:
    """One period's."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}  # by index: samples
        self._answered: set[int] = set()
        self._reused: dict[int, int] = {}

    def asked(self, index: int, samples: int) -> None:
        self._new(index)
        self._asked[index] = samples

    def reused(self, index: int, samples: int) -> None:
        self._new(index)
        self._reused[index] = samples

    def answered(self, index: int) -> None:
        if index not in self._asked or index in self._answered:
            how = "twice" if index in self._answered else "without having been asked"
            raise OnPolicyError(f"group {index} was answered {how}: its samples would not be trained exactly once")
        self._answered.add(index)

    def balance(self, period: int, settled: Mapping[int, tuple[int, bool]], *, may_leave: bool) -> dict[str, int]:
        """Counts of samples; `settled` says of each index how many and whether they were trained. Raises when they do
        not add up; only a period that chooses among candidates may leave some."""
        sources = self._asked | self._reused
        unknown = [index for index in settled if index not in self._answered and index not in self._reused]
        if unknown:
            raise OnPolicyError(f"period {period} settled the groups {sorted(unknown)[:8]} that nobody answered")
        short = [index for index, (count, _) in settled.items() if count != sources[index]]
        if short:
            raise OnPolicyError(f"period {period} settled other samples of the groups {sorted(short)[:8]} than asked")
        unneeded = {index: count for index, count in sources.items() if index not in settled}
        if unneeded and not may_leave:
            raise OnPolicyError(f"period {period} asked for the groups {sorted(unneeded)[:8]} and lost them")
        return {
            "asked": sum(self._asked.values()),
            "answered": sum(self._asked[index] for index in self._answered),
            "reused": sum(self._reused.values()),
            "unneeded": sum(unneeded.values()),
            "filtered": sum(count for count, kept in settled.values() if not kept),
            "trained": sum(count for count, kept in settled.values() if kept),
        }

    def _new(self, index: int) -> None:
        if index in self._asked or index in self._reused:
            raise OnPolicyError(f"group {index} was asked for twice: its samples would not be trained exactly once")
