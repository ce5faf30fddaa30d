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
from rondo.observe.diagnosis import Waits
from rondo.observe.lane import Lane
from rondo.stream.packing import packs, parts_of
from rondo.stream.queue import GroupQueue
from rondo.types import Group, MicroBatch, Part, Shortfall

PATIENCE_SECONDS = 60.0  # of one look into the queue, which wakes it: any number will do


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    groups: int  # per period
    updates: int  # per period; update k takes the prompts j with floor(j * updates / groups) = k
    micro_tokens: int
    synchronous: bool
    prompt_order: bool
    filtered: bool = False  # groups that come are those that passed a filter
    ranks: int = 1  # a micro-batch is a round: one pack for each


class Loader:
    def __init__(
        self,
        *,
        queue: GroupQueue,
        settings: LoaderSettings,
        has_gradient: Callable[[Group], bool],
        lane: Lane,
        waits: Waits | None = None,
        finish: Callable[[list[Group]], list[Group]] | None = None,
    ) -> None:
        self._queue = queue
        self._settings = settings
        self._has_gradient = has_gradient
        self._finish = (
            finish  # needs all groups of the period, in prompt order: then nothing is yielded before the last
        )
        self._lane = lane
        self._waits = waits or Waits()

    def updates(self, period: int) -> Iterator[Iterator[MicroBatch]]:
        """The period's updates, in order; each yields micro-batches until all its groups were handed out."""
        self._period = period
        self._total = self._settings.groups  # less after a shortfall
        self._waiting: dict[int, Group] = {}  # by index, in order of arrival
        self._received: set[int] = set()
        if self._settings.synchronous or self._finish is not None:
            self._wait_until(lambda: len(self._received) == self._total)
        if self._finish is not None:
            whole = [self._waiting[index] for index in sorted(self._waiting)]
            self._waiting |= {group.index: group for group in self._finish(whole)}
        for update in range(self._settings.updates):
            yield (self._in_prompt_order(update) if self._settings.prompt_order else self._as_they_come(update))

    def _as_they_come(self, update: int) -> Iterator[MicroBatch]:
        """Work-conserving: whatever is ready is packed and trained; nothing waits to fill a budget."""
        handed = 0
        backlog: list[Part] = []
        patience = 0.0

        def ready() -> list[Group]:
            return [group for group in self._waiting.values() if self._update_of(group) == update]

        def over() -> bool:
            return handed == len(self._places(update))

        def enough() -> bool:
            """Something for every rank, or all that there will be."""
            arrived = len(ready())
            return len(backlog) + arrived >= self._settings.ranks or handed + arrived == len(self._places(update))

        while backlog or not over():
            if not backlog:
                self._wait_until(lambda: bool(ready()) or over())
            self._wait_a_while(patience, enough)
            self._receive_ready()
            taken = [self._waiting.pop(group.index) for group in ready()]
            handed += len(taken)
            skipped = tuple(group for group in taken if not self._has_gradient(group))
            for group in filter(self._has_gradient, taken):
                backlog += parts_of(group, self._settings.micro_tokens)
            with self._lane.doing("packing"):
                pack = next(packs(backlog, self._settings.micro_tokens, self._settings.ranks), ())
            backlog = backlog[len(pack) :]
            began = time.monotonic()
            yield MicroBatch(parts=pack, skipped=skipped)
            patience = time.monotonic() - began  # what the next round is predicted to take

    def _in_prompt_order(self, update: int) -> Iterator[MicroBatch]:
        skipped: list[Group] = []

        def parts() -> Iterator[Part]:
            for place in self._places(update):
                group = self._take(place)
                if group is None:
                    return
                if self._has_gradient(group):
                    yield from parts_of(group, self._settings.micro_tokens)
                else:
                    skipped.append(group)

        for pack in packs(parts(), self._settings.micro_tokens, self._settings.ranks):
            yield MicroBatch(parts=pack)
        yield MicroBatch(parts=(), skipped=tuple(skipped))

    def _wait_a_while(self, patience: float, enough: Callable[[], bool]) -> None:
        """Ranks run their rounds together: wait until there is something for each, but no longer than a round takes."""
        deadline = time.monotonic() + patience
        with self._lane.doing("waiting for groups"):
            while not enough() and (remaining := deadline - time.monotonic()) > 0:
                if (arrived := self._queue.get(seconds=remaining)) is not None:
                    self._accept(arrived)

    def _places(self, update: int) -> list[int]:
        """The places that belong to this update: fixed by prompt order, whatever finishes first."""
        groups, updates = self._settings.groups, self._settings.updates
        return [place for place in range(self._total) if place * updates // groups == update]

    def _update_of(self, group: Group) -> int:
        if self._settings.updates == 1:
            return 0
        return _place(group) * self._settings.updates // self._settings.groups

    def _take(self, place: int) -> Group | None:
        """The group of this place; None if it turned out that there is none."""

        def here() -> list[Group]:
            return [group for group in self._waiting.values() if _place(group) == place]

        self._wait_until(lambda: bool(here()) or place >= self._total)
        return self._waiting.pop(here()[0].index) if here() else None

    def _receive_ready(self) -> None:
        while (arrived := self._queue.get(seconds=0)) is not None:
            self._accept(arrived)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        state = "waiting for groups" if self._received else "waiting for first group"
        with self._lane.doing(state), self._waits.awaiting("groups", "the producer", self._awaited):
            while not condition():
                if (arrived := self._queue.get(seconds=PATIENCE_SECONDS)) is not None:
                    self._lane.switch("waiting for groups")
                    self._accept(arrived)

    def _accept(self, arrived: Group | Shortfall) -> None:
        """Exactly once, and only this period's."""
        if isinstance(arrived, Shortfall):
            assert arrived.period == self._period
            self._total = arrived.groups
            return
        if arrived.period != self._period or arrived.index in self._received:
            raise RondoError(
                f"period {self._period} received group {arrived.index} of period {arrived.period} "
                f"{'twice' if arrived.index in self._received else 'by mistake'}: a bug in the producer"
            )
        self._received.add(arrived.index)
        self._waiting[arrived.index] = arrived

    def _awaited(self) -> str:
        count = f"period {self._period}: {self._total - len(self._received)} of {self._total} groups"
        if self._settings.filtered:  # which ones will be kept is not known
            return count
        missing = sorted(set(range(self._total)) - self._received)
        return count + f" ({', '.join(map(str, missing[:6]))}{', ...' if len(missing) > 6 else ''})"


def _place(group: Group) -> int:
    return group.index if group.place is None else group.place
