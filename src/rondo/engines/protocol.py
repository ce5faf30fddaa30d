"""What Rondo asks of an engine; `client.py` speaks it over HTTP, tests hold an in-memory twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rondo.types import Answer, Confirmation, Sampling


@dataclass(frozen=True, kw_only=True)
class EngineState:
    boot: str
    version: int
    slots: int
    max_model_len: int


class Engine(Protocol):
    url: str

    async def state(self) -> EngineState: ...

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling) -> Answer: ...

    async def pause(self) -> None:
        """Returns when nothing is being generated; nothing starts until `resume`."""

    async def load_weights(self, *, path: str, version: int, checksum: str) -> Confirmation: ...

    async def reset_prefix_cache(self) -> None: ...

    async def resume(self) -> None: ...
