"""Where a resumed run goes on: from the last checkpoint, through the journal, into the interrupted period.

    checkpoint p0 | p0 .. p-1: complete in the journal | p: interrupted | later: nothing
                  | trained again as recorded          | its groups are taken, the rest is generated

Nothing is generated for the periods that are trained again; after each of their steps the weights must have the hash
that the journal says. What cannot be repeated (other settings, periods that the journal does not hold, an accelerator
that adds in another order) is generated again, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rondo.config import Config
from rondo.errors import JournalError
from rondo.launch.build_loader import whole_period
from rondo.observe.ledger import software
from rondo.prompts.stream import PromptStream
from rondo.rollout.journal import ALIKE, RecordedPeriod, read_period, recorded_periods
from rondo.rollout.recall import still_asked_for
from rondo.trainer.ensemble import AnyTrainer
from rondo.types import MicroBatch
from rondo.weights.checksum import checksum

# What decides neither about samples nor about weights.
FREE = {
    "run.name", "run.folder", "schedule.periods", "trainer.ranks", "trainer.threads", "trainer.cpus", "trainer.device",
    "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.memory_share", "rewards.seconds",
    "rewards.on_error", "rewards.workers", "rewards.memory_mb", "data.eval",
}  # fmt: skip
SECTIONS = ("run", "model", "data", "rollout", "schedule", "algorithm", "trainer", "rewards")


def journal_header(config: Config, ranks: int) -> dict[str, Any]:
    """How a period is trained, as its journal says it."""
    return {
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "micro_tokens": config.trainer.micro_tokens,
        "software": software(),
        "settings": settings_of(config),
    }


def settings_of(config: Config) -> dict[str, Any]:
    """By dotted key, all that decides about samples and weights."""
    tree = config.model_dump(mode="json")
    free = FREE - {"schedule.periods"} if config.trainer.decay != "constant" else FREE  # the decay ends with the last
    flat = {f"{section}.{key}": value for section in SECTIONS for key, value in tree[section].items()}
    return {key: value for key, value in flat.items() if key not in free}


@dataclass(frozen=True, kw_only=True)
class Resumption:
    start: int  # the first period that is not complete; also the version of the weights
    replayed: int = 0  # periods that were trained again
    interrupted: RecordedPeriod | None = None  # with the groups that need not be generated


@dataclass(kw_only=True)
class Replay:
    """Trains what the journal holds after a checkpoint; `trainer` and `prompts` stand at it."""

    config: Config
    folder: Path
    header: Mapping[str, Any]  # of this run
    trainer: AnyTrainer
    prompts: PromptStream
    promised: bool  # that the same steps give the same bits
    say: Callable[[str], None]
    check: Callable[[], None]  # raises when the run is asked to stop
    on_period: Callable[[RecordedPeriod], None]  # called when one was trained again

    def run(self, start: int) -> Resumption:
        held = recorded_periods(self.folder)
        first, last = start, max(held, default=-1)
        checked = False  # whether the weights are known to be those that the next period was sampled from
        while start in held:
            period = read_period(self.folder, start)
            if why := self._sampled_otherwise(period, checked=checked):
                self.say(f"period {start} {why}: {_again(start, last)}")
                break
            if not period.complete:
                return self._goes_on(period, start - first)
            if why := self._trained_otherwise(period):
                rest = f"; {_again(start + 1, last)}" if last > start else ""
                self.say(f"period {start} {why}: its groups are trained anew{rest}")
                return self._goes_on(period, start - first)
            faithful, checked = self._train(period)
            self.prompts.advance(len(period.settled))
            self.on_period(period)
            start += 1
            if not faithful:
                self._unfaithful(start - 1, last)
                break
        else:
            if not self.config.journal.enabled or last > start:
                why = "does not hold all of it (journal.keep)" if self.config.journal.enabled else "is off"
                self.say(f"the journal {why}: what came after period {start} began is generated again")
        return Resumption(start=start, replayed=start - first)

    def _goes_on(self, period: RecordedPeriod, replayed: int) -> Resumption:
        usable = still_asked_for(
            period,
            prompts=self.prompts.ahead(),
            run_seed=self.config.run.seed,
            group_size=self.config.rollout.group_size,
        )
        if lost := len(period.settled) - len(usable.settled):
            self.say(
                f"{lost} of {len(period.settled)} journalled groups of period {period.period} are of other prompts or "
                "seeds than this run would ask for (was the data changed?): they are generated again"
            )
        return Resumption(start=period.period, replayed=replayed, interrupted=usable)

    def _sampled_otherwise(self, period: RecordedPeriod, *, checked: bool) -> str:
        """Why its groups are not those that this run would get; empty: they are."""
        if not period.header:
            return "has no whole record in the journal"
        if other := self._changed(period, lambda key: not key.startswith(("trainer.", "schedule."))):
            return other
        if not checked and period.header.get("published") not in (None, self._published()):
            return "was sampled from other weights than these"
        return ""

    def _trained_otherwise(self, period: RecordedPeriod) -> str:
        for key in ALIKE:
            if period.header[key] != self.header[key]:
                return f"was trained with {key} = {period.header[key]} and this run has {self.header[key]}"
        return self._changed(period, lambda key: True)

    def _changed(self, period: RecordedPeriod, matters: Callable[[str], bool]) -> str:
        mine = self.header["settings"]
        told = period.header.get("settings", mine)
        for key in filter(matters, mine):
            if told.get(key) != mine[key]:
                return f"was recorded with {key} = {told.get(key)} and this run has {mine[key]}"
        return ""

    def _train(self, period: RecordedPeriod) -> tuple[bool, bool]:
        """Whether every step gave the bits that were recorded, and whether they were recorded at all."""
        faithful, told = True, True
        self.trainer.begin_period()
        for update, micros in enumerate(period.rebuilt(whole_period(self.config))):
            self._feed(micros)
            self.trainer.step()
            found, recorded = self.trainer.hashes, period.updates[update].hashes
            told = found is not None and recorded is not None
            if found is not None and recorded is not None and found.weights != recorded.weights:
                faithful = False
                if self.promised:
                    raise JournalError(
                        f"period {period.period} of {self.folder}, trained again as recorded, gives weights "
                        f"{found.weights} after update {update} instead of {recorded.weights}: it was recorded "
                        f"{self._otherwise(period)}; resume there, or remove {self.folder / 'journal'} to generate "
                        "again what came after the last checkpoint"
                    )
        return faithful, told

    def _feed(self, micros: list[MicroBatch]) -> None:
        for micro in micros:
            self.check()
            self.trainer.accumulate(micro)

    def _unfaithful(self, period: int, last: int) -> None:
        self.say(
            f"period {period}, trained again, differs by rounding: this device adds in an order of its own; its groups "
            f"were reused" + (f", {_again(period + 1, last)}" if last > period else "")
        )

    def _otherwise(self, period: RecordedPeriod) -> str:
        told, mine = period.header["software"], self.header["software"]
        other = [f"{name} {told[name]}" for name in mine if told.get(name) != mine[name]]
        return f"with {' and '.join(other)}" if other else "by another kind of processor, or the record is damaged"

    def _published(self) -> str:
        dtype = getattr(torch, self.config.model.dtype)
        return checksum((name, tensor.to(dtype)) for name, tensor in self.trainer.weights())


def _again(first: int, last: int) -> str:
    return f"period {first} is generated again" if last <= first else f"periods {first} to {last} are generated again"
