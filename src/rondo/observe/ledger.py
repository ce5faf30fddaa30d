"""The ledger: accounts for every group of a period, and stops a run whose account does not balance.

Groups are entered by the producer's thread when they are settled, before the loader can see them; micro-batches and
steps by the trainer's thread. Everything is journalled as it comes. `finish` closes the period: what was asked must
have been answered, entered and trained, once, from the one version that was published, and the balance becomes a line
of `certificate.jsonl`. It looks at what was really handed over, not at what those who did it say.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import rondo
from rondo.errors import OnPolicyError
from rondo.observe.samples import SampleAccount
from rondo.rollout.journal import Journal
from rondo.types import Group, MicroBatch, Publication, StepHashes


@dataclass(frozen=True, kw_only=True)
class LedgerSettings:
    groups: int  # per period
    updates: int  # per period
    filtered: bool  # a filter may leave groups out, and a period short
    max_logp_gap: float  # mean |engine - trainer| of a period


class Ledger:
    def __init__(
        self,
        *,
        folder: Path,
        journal: Journal | None,
        settings: LedgerSettings,
        published: Callable[[], Publication | None],
        measured: Callable[[], Mapping[str, float]],
        retried: Callable[[], int] = int,
    ) -> None:
        self._path = folder / "certificate.jsonl"
        self._journal = journal
        self._settings = settings
        self._published = published
        self._measured = measured  # the trainer's metrics of the period so far
        self._retried = retried  # requests sent again, in the whole run
        self._retried_before = 0
        self.events = 0  # entered in the whole run: grows as long as anything goes on
        self._seconds = 0.0  # the producer's and the trainer's both: an addition that is lost now and then is no harm
        self._begin()

    def asked(self, index: int, samples: int) -> None:
        """Called by the producer before a group's request leaves for the engines; sent again, it is the same."""
        self._samples.asked(index, samples)

    def answered(self, index: int) -> None:
        self._samples.answered(index)

    def reused(self, index: int, samples: int) -> None:
        """Instead of the two above: the group is in the journal of the interrupted run."""
        self._samples.reused(index, samples)

    def group(self, group: Group, kept: bool) -> None:
        self.events += 1
        with self._timed():
            self._admit(group)
            self._entered[group.index] = (len(group.answer.responses), kept)
            self._boots.add(group.answer.boot)
            if self._journal:
                self._journal.group(group, kept)

    def micro(self, micro: MicroBatch) -> None:
        self.events += 1
        with self._timed():
            for part in micro.parts:
                self._trained.setdefault(part.group.index, []).append((part.first, part.last))
            for group in micro.skipped:
                self._trained.setdefault(group.index, []).append((0, len(group.answer.responses)))
            self._skipped += len(micro.skipped)
            if self._journal:
                self._journal.micro(micro)

    def step(self, hashes: StepHashes | None) -> None:
        self.events += 1
        with self._timed():
            self._steps.append(hashes)
            if self._journal:
                self._journal.step(hashes)

    def finish(self, period: int) -> None:
        """Called when the period's last version was published. Raises OnPolicyError when something does not add up."""
        with self._timed():
            account = self._balance(period)
            self.write(account)
            if self._journal:
                self._journal.finish(account)
            self._begin()

    def write(self, account: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(account) + "\n")

    def take_seconds(self) -> float:
        """Time spent in here and in the journal since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent

    def _begin(self) -> None:
        self._samples = SampleAccount()
        self._entered: dict[int, tuple[int, bool]] = {}  # by index: responses, kept
        self._boots: set[str] = set()
        self._trained: dict[int, list[tuple[int, int]]] = {}  # by index: responses first..last, as they were taken
        self._skipped = 0  # groups among these that are counted but have no gradient
        self._steps: list[StepHashes | None] = []
        self._from: Publication | None = None  # what the period's groups were sampled from

    def _admit(self, group: Group) -> None:
        held = self._published()
        if self._from is None:
            self._from = held
        if held != self._from or held is None or held.version != group.period:
            raise OnPolicyError(
                f"group {group.index} of period {group.period} came while the engines hold version "
                f"{held and held.version}: it would be trained off-policy"
            )
        if group.answer.version != (group.period, group.period):
            raise OnPolicyError(
                f"group {group.index} of period {group.period} was sampled from versions {group.answer.version} by "
                f"{group.answer.engine}: it would be trained off-policy"
            )
        if group.index in self._entered:
            raise OnPolicyError(f"group {group.index} of period {group.period} was settled twice")

    def _balance(self, period: int) -> dict[str, Any]:
        kept = {index: count for index, (count, needed) in self._entered.items() if needed}
        self._balance_groups(period, kept)
        samples = self._samples.balance(period, self._entered, may_leave=self._settings.filtered)
        retried, self._retried_before = self._retried() - self._retried_before, self._retried()
        published, gap = self._published(), self._measured()
        if published is None or published.version != period + 1:
            raise OnPolicyError(f"period {period} ended with version {published and published.version} published")
        if len(self._steps) != self._settings.updates:
            raise OnPolicyError(f"period {period} took {len(self._steps)} steps instead of {self._settings.updates}")
        if gap.get("logp_gap_mean", 0.0) > self._settings.max_logp_gap:
            raise OnPolicyError(
                f"the engines' log-probs of period {period} are off by {gap['logp_gap_mean']:.2g} on average from the "
                f"trainer's (limit {self._settings.max_logp_gap:.2g}): they hold other weights, or compute them "
                "differently; journal.max_logp_gap sets the limit"
            )
        last = self._steps[-1]
        return {
            "period": period,
            "version": period,  # published to, confirmed by and sampled from every engine
            "published_checksum": self._from and self._from.checksum,
            "engines": self._from and self._from.engines,
            "boots": len(self._boots),
            "groups": len(self._entered),
            "groups_trained": len(kept) - self._skipped,
            "groups_without_gradient": self._skipped,
            "groups_filtered": len(self._entered) - len(kept),
            "samples": sum(kept.values()),
            "ledger": {**samples, "retried": retried},  # samples, and requests that were sent again
            "logp_gap_mean": gap.get("logp_gap_mean"),
            "logp_gap_max": gap.get("logp_gap_max"),
            "gradient_hashes": [hashes.gradient for hashes in self._steps if hashes],
            "weights_hash": last and last.weights,  # of version + 1
            "next_checksum": published.checksum,
        }

    def _balance_groups(self, period: int, kept: Mapping[int, int]) -> None:
        """The fixed set, and every sample of it once."""
        if sorted(self._entered) != list(range(len(self._entered))):
            missing = set(range(max(self._entered))) - set(self._entered)
            raise OnPolicyError(f"period {period} left out the groups {sorted(missing)[:8]} that came before others")
        if len(kept) > self._settings.groups or (len(kept) < self._settings.groups and not self._settings.filtered):
            raise OnPolicyError(f"period {period} settled {len(kept)} groups instead of {self._settings.groups}")
        wrong = [index for index, count in kept.items() if not _whole(self._trained.get(index, []), count)]
        wrong += self._trained.keys() - kept.keys()
        if wrong:
            raise OnPolicyError(f"period {period} did not train each sample once: see the groups {sorted(wrong)[:8]}")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began


def _whole(ranges: Sequence[tuple[int, int]], count: int) -> bool:
    """Whether these stretches cover 0..count once."""
    reached = 0
    for first, last in sorted(ranges):
        if first != reached:
            return False
        reached = last
    return reached == count


def software() -> dict[str, str]:
    """The versions that decide about bits."""
    found = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "rondo": rondo.__version__} | found
