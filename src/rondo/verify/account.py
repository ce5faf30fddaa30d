"""What the journal itself must show, before anything is computed: one version, a fixed set, every sample once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rondo.config import Config
from rondo.rollout.filters import nonzero_spread
from rondo.rollout.journal import RecordedPeriod, covered
from rondo.rollout.seeds import group_seed


def violations(config: Config, period: RecordedPeriod, *, cursor: int | None = None) -> list[str]:
    """Sentences; none when the period's set, versions, seeds and coverage are as they must be."""
    settled = sorted((*period.groups, *period.filtered), key=lambda group: group.index)
    name = f"period {period.period}"
    found = []
    if [group.index for group in settled] != list(range(len(settled))):
        found.append(f"{name}: its groups are not the first ones in prompt order")
    if cursor is not None and [group.prompt.ordinal for group in settled] != list(range(cursor, cursor + len(settled))):
        found.append(f"{name}: its prompts are not the next ones of the data")
    stale = [group.index for group in settled if group.answer.version != (period.period, period.period)]
    if stale:
        found.append(f"{name}: groups {stale[:8]} were sampled from another version")
    named = [
        group.index
        for group in settled
        if group.seed != group_seed(config.run.seed, period.period, group.prompt.ordinal)
    ]
    if named:
        found.append(f"{name}: groups {named[:8]} were drawn with other seeds than their own")
    return found + _coverage(name, period) + _selection(config, name, period)


def _coverage(name: str, period: RecordedPeriod) -> list[str]:
    micros = [micro for update in period.updates for micro in update.micros]
    seen = covered(micros)
    skipped = Counter(index for micro in micros for index in micro.skipped)
    wrong = [
        group.index
        for group in period.groups
        if sorted(seen.get(group.index, [])) + list(range(len(group.answer.responses))) * skipped[group.index]
        != list(range(len(group.answer.responses)))
    ]
    foreign = (seen.keys() | skipped.keys()) - {group.index for group in period.groups}
    if wrong or foreign:
        return [f"{name}: groups {sorted({*wrong, *foreign})[:8]} were not trained exactly once"]
    return []


def _selection(config: Config, name: str, period: RecordedPeriod) -> list[str]:
    """With a filter: what was kept differs, what was left out does not. (Length costs reward only after it looked.)"""
    if config.algorithm.filter == "none":
        missing = config.rollout.prompts_per_period - len(period.groups)
        return [f"{name}: {missing} groups are missing"] if missing or period.filtered else []
    if config.algorithm.overlong_buffer:
        return []
    wrong = [group.index for group in period.groups if not nonzero_spread(group.rewards)]
    wrong += [group.index for group in period.filtered if nonzero_spread(group.rewards)]
    return [f"{name}: the filter judged groups {sorted(wrong)[:8]} wrongly"] if wrong else []


def all_violations(config: Config, periods: Sequence[RecordedPeriod]) -> list[str]:
    found: list[str] = []
    cursor: int | None = None
    for period in periods:
        found += violations(config, period, cursor=cursor)
        ordinals = [group.prompt.ordinal for group in (*period.groups, *period.filtered)]
        cursor = max(ordinals, default=0) + 1
    return found
