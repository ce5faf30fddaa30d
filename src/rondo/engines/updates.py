"""Taking new weights: start, one or more files, finish. A small state machine over the engine's model.

closed --start--> open --load--> open (weights mixed) --finish--> closed
While weights are mixed, and after a finish that failed, the engine's version is BROKEN_VERSION: it answers
nothing until a good update has been finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from rondo.engines.embedded import EmbeddedEngine
from rondo.errors import PublicationError
from rondo.weights.checksum import checksum
from rondo.weights.files import copy_into, read_weights

BROKEN_VERSION = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class Announcement:
    """What a publisher says about the weights it sends, with every file."""

    version: int
    checksum: str


class UnreadableWeightsError(PublicationError):
    """The file is missing or damaged; nothing was changed."""


class WeightUpdates:
    """Runs in the thread that owns the engine."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._parameters = dict(engine.model.named_parameters())  # tied ones once
        self._announced: Announcement | None = None
        self._seen: set[str] = set()
        self.open = False

    def start(self) -> None:
        """Open an update; one that was left open is given up."""
        if not self._engine.paused or self._engine.running:
            raise PublicationError(
                f"weights may change only when paused with nothing running (paused: {self._engine.paused}, "
                f"{self._engine.running} requests running): POST /pause?mode=wait first"
            )
        self.open = True
        self._announced = None
        self._seen = set()

    def load(self, path: Path, announced: Announcement) -> None:
        if not self.open:
            raise PublicationError("no weight update is open: POST /start_weight_update first")
        if self._announced not in (None, announced):
            raise PublicationError(f"this file announces {announced}, an earlier one {self._announced}")
        tensors = _read(path)
        self._announced = announced
        self._engine.version = BROKEN_VERSION
        known = {name: self._parameters[name] for name in tensors if name in self._parameters}
        copy_into(known, tensors.items())
        self._seen |= known.keys()

    def finish(self) -> str:
        """Take over the announced version; the checksum of the model's own tensors."""
        if not self.open or self._announced is None:
            raise PublicationError("no weights were loaded: POST /start_weight_update and /update_weights first")
        self.open = False
        if missing := sorted(self._parameters.keys() - self._seen):
            raise PublicationError(f"the update lacks {len(missing)} of the engine's tensors, {missing[0]} first")
        held = checksum(self._parameters.items())
        if held != self._announced.checksum:
            raise PublicationError(
                f"the weights loaded for version {self._announced.version} have checksum {held}, but "
                f"{self._announced.checksum} was announced"
            )
        self._engine.weights_changed(self._announced.version)
        return held


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return read_weights(path)
    except (OSError, SafetensorError) as error:
        raise UnreadableWeightsError(f"weights cannot be read from {path}: {error}") from error
