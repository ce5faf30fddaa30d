"""Taking new weights: start, one or more buckets, the checksum of the whole, finish. A small state machine over the
engine's model.

closed --start--> open --load--> open (weights mixed) --seal--> open --finish--> closed
While weights are mixed, and after a finish that failed, the engine's version is BROKEN_VERSION: it answers
nothing until a good update has been finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rondo.engines.embedded import EmbeddedEngine
from rondo.errors import PublicationError
from rondo.weights.checksum import Checksum
from rondo.weights.receive import Receiver

BROKEN_VERSION = -2


class WeightUpdates:
    """Runs in the thread that owns the engine."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._parameters = dict(engine.model.named_parameters())  # tied ones once
        self._receiver = Receiver(device=engine.model.device)
        self._held = Checksum()
        self._version: int | None = None
        self._announced = ""
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
        self._held, self._version, self._announced = Checksum(), None, ""
        self._seen = set()
        self._receiver.begin()

    def update(self, info: Mapping[str, Any], *, version: int) -> None:
        """A bucket (`transport` says how to get it), or the `checksum` of all of them."""
        if not self.open:
            raise PublicationError("no weight update is open: POST /start_weight_update first")
        if self._version not in (None, version):
            raise PublicationError(f"this update announces version {version}, an earlier one {self._version}")
        self._version = version
        if "checksum" in info:
            self._announced = info["checksum"]
        if "transport" in info:
            self._load(info)

    def finish(self) -> str:
        """Take over the announced version; the checksum of the model's own tensors."""
        if not self.open or not self._announced or not self._seen:
            raise PublicationError("no weights were loaded: POST /start_weight_update and /update_weights first")
        self.open = False
        if missing := sorted(self._parameters.keys() - self._seen):
            raise PublicationError(f"the update lacks {len(missing)} of the engine's tensors, {missing[0]} first")
        held = self._held.digest()
        if held != self._announced:
            raise PublicationError(
                f"the weights loaded for version {self._version} have checksum {held}, but "
                f"{self._announced} was announced"
            )
        assert self._version is not None
        self._receiver.sealed(self._version)
        self._engine.weights_changed(self._version)
        return held

    def _load(self, info: Mapping[str, Any]) -> None:
        for name, tensor in self._receiver.receive(info):
            self._engine.version = BROKEN_VERSION
            if name not in self._parameters:
                raise PublicationError(f"published {name} is no tensor that the engine holds")
            self._held.add(name, _copy_into(self._parameters[name], name, tensor))
            self._seen.add(name)


def _copy_into(target: torch.Tensor, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if target.shape != tensor.shape:
        raise PublicationError(
            f"published {name} has shape {tuple(tensor.shape)} but the engine holds shape {tuple(target.shape)}"
        )
    with torch.no_grad():
        return target.copy_(tensor).detach()
