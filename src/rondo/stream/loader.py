"""The trainer's data loader: what makes the loop periodically asynchronous.

Consumes the groups of one period from the queue, produces micro-batches. Waits for the producer's thread, which wakes
it by `GroupQueue.put` or `GroupQueue.fail`. The synchronous baseline is this loader waiting for the last group before
it yields the first; there is no second loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rondo.errors import RondoError
from rondo.observe.lane import Lane
from rondo.stream.packing import packs, parts_of
from rondo.stream.queue import GroupQueue
from rondo.types import Group, MicroBatch, Part


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    groups: int  # per period
    updates: int  # per period; update k takes the prompts j with floor(j * updates / groups) = k
    micro_tokens: int
    synchronous: bool
    prompt_order: bool
    ranks: int = 1  # a micro-batch is a round: one pack for each


class Loader:
    def __init__(
        self,
        *,
        queue: GroupQueue,
        settings: LoaderSettings,
        has_gradient: Callable[[Group], bool],
        lane: Lane,
        on_silence: Callable[[str, float], None],
        silence_seconds: float,
    ) -> None:
        self._queue = queue
        self._settings = settings
        self._has_gradient = has_gradient
        self._lane = lane
        self._on_silence = on_silence
        self._silence_seconds = silence_seconds

    def updates(self, period: int) -> Iterator[Iterator[MicroBatch]]:
        """The period's updates, in order; each yields micro-batches until all its groups were handed out."""
        self._period = period
        self._waiting: dict[int, Group] = {}  # by index, in order of arrival
        self._received: set[int] = set()
        groups, updates = self._settings.groups, self._settings.updates
        members: list[list[int]] = [[] for _ in range(updates)]
        for index in range(groups):
            members[index * updates // groups].append(index)
        if self._settings.synchronous:
            for index in range(groups):
                self._wait_for({index})
        for indices in members:
            yield (self._in_prompt_order(indices) if self._settings.prompt_order else self._as_they_come(indices))

    def _as_they_come(self, indices: list[int]) -> Iterator[MicroBatch]:
        """Work-conserving: whatever is ready is packed and trained; nothing waits to fill a budget."""
        missing = set(indices)
        backlog: list[Part] = []
        patience = 0.0
        while missing or backlog:
            if not backlog:
                self._wait_for(missing)
            self._wait_for_all_ranks(missing, len(backlog), patience)
            self._receive_ready()
            ready = [self._waiting.pop(index) for index in list(self._waiting) if index in missing]
            missing -= {group.index for group in ready}
            skipped = tuple(group for group in ready if not self._has_gradient(group))
            for group in ready:
                if group not in skipped:
                    backlog += parts_of(group, self._settings.micro_tokens)
            pack = next(packs(backlog, self._settings.micro_tokens, self._settings.ranks), ())
            backlog = backlog[len(pack) :]
            began = time.monotonic()
            yield MicroBatch(parts=pack, skipped=skipped)
            patience = time.monotonic() - began  # what the next round is predicted to take

    def _in_prompt_order(self, indices: list[int]) -> Iterator[MicroBatch]:
        skipped: list[Group] = []

        def parts() -> Iterator[Part]:
            for index in indices:
                self._wait_for({index})
                group = self._waiting.pop(index)
                if self._has_gradient(group):
                    yield from parts_of(group, self._settings.micro_tokens)
                else:
                    skipped.append(group)

        for pack in packs(parts(), self._settings.micro_tokens, self._settings.ranks):
            yield MicroBatch(parts=pack)
        yield MicroBatch(parts=(), skipped=tuple(skipped))

    def _wait_for_all_ranks(self, missing: set[int], parts: int, patience: float) -> None:
        """Ranks run their rounds together: wait until there is something for each, but no longer than a round takes."""
        deadline = time.monotonic() + patience

        def lacking() -> bool:
            arrived = len(missing & self._waiting.keys())
            return arrived < len(missing) and parts + arrived < self._settings.ranks

        with self._lane.doing("waiting for groups"):
            while lacking() and (remaining := deadline - time.monotonic()) > 0:
                if (group := self._queue.get(seconds=remaining)) is not None:
                    self._accept(group)

    def _receive_ready(self) -> None:
        while (group := self._queue.get(seconds=0)) is not None:
            self._accept(group)

    def _wait_for(self, wanted: set[int]) -> None:
        """Returns when at least one of these groups is here."""
        if not wanted.isdisjoint(self._waiting):
            return
        with self._lane.doing("waiting for groups" if self._received else "waiting for first group"):
            since = time.monotonic()
            while wanted.isdisjoint(self._waiting):
                group = self._queue.get(seconds=self._silence_seconds)
                if group is None:
                    self._on_silence(self._awaited(), time.monotonic() - since)
                    continue
                self._lane.switch("waiting for groups")
                self._accept(group)

    def _accept(self, group: Group) -> None:
        """Exactly once, and only this period's."""
        if group.period != self._period or group.index in self._received:
            raise RondoError(
                f"period {self._period} received group {group.index} of period {group.period} "
                f"{'twice' if group.index in self._received else 'by mistake'}: a bug in the producer"
            )
        self._received.add(group.index)
        self._waiting[group.index] = group

    def _awaited(self) -> str:
        missing = sorted(set(range(self._settings.groups)) - self._received)
        shown = ", ".join(map(str, missing[:6])) + (", ..." if len(missing) > 6 else "")
        return f"period {self._period}: {len(missing)} of {self._settings.groups} groups ({shown})"
