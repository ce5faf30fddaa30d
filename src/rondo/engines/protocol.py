"""What Rondo asks of an engine; `client.py` speaks it over HTTP, tests hold an in-memory twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rondo.types import Answer, Confirmation, Sampling

# Sizes of a model, by their names in its config, that must be the trainer's: another model would fail later, and less
# clearly.
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, kw_only=True)
class EngineState:
    boot: str
    version: int
    slots: int
    max_model_len: int
    shape: Mapping[str, int] = field(default_factory=dict)  # sizes of its model, under their names in its config
    note: str = ""  # what a user should hear about it


class Engine(Protocol):
    url: str

    async def health(self) -> None:
        """Returns when the engine gives a sign of life; cheap, and answered whatever else goes on."""

    async def state(self) -> EngineState: ...

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling) -> Answer: ...

    async def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1) of each token but the first, given those before it."""

    async def pause(self) -> None:
        """Returns when nothing is being generated; nothing starts until `resume`."""

    async def start_update(self) -> None:
        """Weights are about to change; only when paused."""

    async def update(self, info: Mapping[str, Any]) -> None:
        """Some of the weights (`version`, `transport` and what that one needs), or the `checksum` of all of them."""

    async def finish_update(self) -> Confirmation:
        """All weights were given: the engine holds the announced version, or says why not."""

    async def reset_prefix_cache(self) -> None: ...

    async def resume(self) -> None: ...
