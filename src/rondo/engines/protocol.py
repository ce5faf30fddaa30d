"""What Rondo asks of an engine; `client.py` speaks it over HTTP, tests hold an in-memory twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

    async def start_update(self) -> None:
        """Weights are about to change; only when paused."""

    async def update(self, info: Mapping[str, Any]) -> None:
        """Some of the weights, or all: `version`, `checksum` (of all), `transport` and what that one needs."""

    async def finish_update(self) -> Confirmation:
        """All weights were given: the engine holds the announced version, or says why not."""

    async def reset_prefix_cache(self) -> None: ...

    async def resume(self) -> None: ...

    async def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a text's tokens from the second on, at temperature 1."""
