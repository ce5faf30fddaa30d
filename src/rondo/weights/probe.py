"""The same text, scored by trainer and engine: the one check that sees what an engine computes with.

A checksum says which bytes an engine received. Weights that were packed for the processor before and not again, or a
head that is tied on one side only, show here: the log-probs are then far outside of what rounding explains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rondo.errors import EngineError, PublicationError

# Mean difference per token that rounding explains. Seen: 1e-6 in float32; up to 8e-3 on one token in bfloat16.
RANGES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


class Scored(Protocol):
    url: str

    async def prompt_logps(self, token_ids: Sequence[int]) -> list[float]: ...


class Probe:
    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        score: Callable[[Sequence[int]], list[float]],
        submit: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
        allowed: float,
    ) -> None:
        self._token_ids = tuple(token_ids)
        self._score = score
        self._submit = submit
        self._allowed = allowed
        self._own: list[float] = []  # the trainer's, of the last publication
        self._version = -1
        self.gap = 0.0  # the largest since the last publication

    def __call__(self, version: int, engines: Sequence[Scored]) -> dict[Any, Exception]:
        """Raises PublicationError for an engine that computes with other weights; returns those that did not answer."""
        asked = self._submit(_ask(engines, self._token_ids))
        own = self._score(self._token_ids)  # while the engines do the same
        self._own, self._version, self.gap = own, version, 0.0
        silent: dict[Any, Exception] = {}
        for engine, theirs in zip(engines, asked.result(), strict=True):
            if isinstance(theirs, EngineError):
                silent[engine] = theirs
            else:
                self._compare(engine, theirs)
        return silent

    async def one(self, engine: Scored) -> None:
        """The same for a newcomer that was fed the last publication: held to what the trainer said then."""
        self._compare(engine, await engine.prompt_logps(self._token_ids))

    def _compare(self, engine: Scored, theirs: Sequence[float]) -> None:
        own = self._own
        if len(theirs) != len(own):
            raise PublicationError(f"engine {engine.url} scored {len(theirs)} tokens of a probe of {len(own)}")
        gap = sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(own)
        if not gap <= self._allowed:
            raise PublicationError(
                f"engine {engine.url} confirmed version {self._version}, but its log-probs of a probe text differ from "
                f"the trainer's by {gap:.2g} per token, where {self._allowed:g} is allowed (weights.probe_gap): it "
                "computes with other weights than it was sent"
            )
        self.gap = max(self.gap, gap)


async def _ask(engines: Sequence[Scored], token_ids: Sequence[int]) -> list[list[float] | EngineError]:
    async def ask(engine: Scored) -> list[float] | EngineError:
        try:
            return await engine.prompt_logps(token_ids)
        except EngineError as error:
            return error

    return await asyncio.gather(*(ask(engine) for engine in engines))
