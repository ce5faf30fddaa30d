"""Checkpoints: weights, optimizer, schedule and data cursor; written aside and renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rondo.errors import StorageError, UserError
from rondo.observe.lane import Lane
from rondo.storage import storage_sentence, sync
from rondo.trainer.ensemble import AnyTrainer
from rondo.weights.checksum import checksum


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands between two periods."""

    period: int  # the next one to train; also the version of the weights
    cursor: int  # of the data stream
    steps: int  # optimizer steps taken
    weights: str  # checksum of the policy


class Checkpoints:
    """The checkpoints of one run: one every so many periods, the newest kept."""

    def __init__(
        self, *, folder: Path, trainer: AnyTrainer, cursor: Callable[[], int], every: int, keep: int, lane: Lane
    ) -> None:
        self._folder = folder
        self._trainer = trainer
        self._cursor = cursor
        self._every = every
        self._keep = keep
        self._lane = lane

    def finish(self, period: int) -> None:
        """Called after every period."""
        if self._every and (period + 1) % self._every == 0:
            with self._lane.doing("saving"):
                self.save(period=period + 1, cursor=self._cursor())

    def save(self, *, period: int, cursor: int) -> Path | None:
        """None where none is kept."""
        if not self._keep:
            return None
        found = checksum(self._trainer.weights())
        progress = Progress(period=period, cursor=cursor, steps=self._trainer.steps, weights=found)
        path = self._folder / f"period-{period:06d}"
        aside = self._folder / f".{path.name}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            self._trainer.write(aside)
            (aside / "progress.json").write_text(json.dumps(asdict(progress), indent=2) + "\n")
            for written in (*aside.rglob("*"), aside):  # a rename must not be on disk before what it names
                sync(written)
        except BaseException as error:  # as which torch raises what went wrong on any rank
            sentence = storage_sentence(self._folder, error)
            shutil.rmtree(aside, ignore_errors=True)  # half a checkpoint is of no use, and its room may be
            if sentence:
                raise StorageError(sentence) from error
            raise
        shutil.rmtree(path, ignore_errors=True)
        os.replace(aside, path)
        sync(self._folder)
        for old in self.paths()[: -self._keep]:
            shutil.rmtree(old)
        return path

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self._folder.glob("period-*"))

    def restore(self) -> Progress | None:
        """Bring the trainer to the newest checkpoint, whatever the number of ranks that wrote it; None when there is
        none."""
        if not self.paths():
            return None
        path = self.paths()[-1]
        progress = Progress(**json.loads((path / "progress.json").read_text()))
        self._trainer.read(path, steps=progress.steps)
        found = checksum(self._trainer.weights())
        if found != progress.weights:
            raise UserError(f"{path} is damaged: its weights have checksum {found}, not {progress.weights}: remove it")
        return progress
