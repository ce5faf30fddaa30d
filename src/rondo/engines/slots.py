"""The rows of the engine's batch: what each sample asked for and what it has drawn so far.

Everything is a preallocated array with one row per slot, so that a decode step does no Python work per row.
Rows 0 .. active-1 are in use; a row that finishes leaves a hole, which the next sample fills or `close_holes`
closes by moving the last row into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rondo.engines.sampling import Draws
from rondo.types import Sampling

Finish = Literal["stop", "length", "abort"]

NO_TOKEN = -1


class Slots:
    """State of S slots, for responses of at most `max_tokens`."""

    def __init__(self, count: int, max_tokens: int) -> None:
        self.count = count
        self.active = 0  # rows in use, holes included
        self.lengths = np.zeros(count, np.int64)  # keys and values held
        self.last = np.zeros(count, np.int64)  # the newest token, not yet among them
        self.drawn = np.zeros(count, np.int64)
        self.tokens = np.zeros((count, max_tokens), np.int64)
        self.logps = np.zeros((count, max_tokens), np.float32)
        self.owners = np.zeros(count, np.int64)  # which request
        self.samples = np.zeros(count, np.int64)  # which of its samples
        self._seeds = np.zeros(count, np.uint64)
        self._temperatures = np.ones(count, np.float32)
        self._top_ps = np.ones(count, np.float32)
        self._limits = np.zeros(count, np.int64)
        self._stops = np.full((count, 1), NO_TOKEN, np.int64)
        self._holes: list[int] = []
        self._rows = np.arange(count)

    @property
    def free(self) -> int:
        return self.count - self.active + len(self._holes)

    @property
    def running(self) -> int:
        return self.active - len(self._holes)

    def take(self, count: int) -> list[int]:
        """`count` free rows, holes first."""
        holes = self._holes[:count]
        del self._holes[:count]
        fresh = range(self.active, self.active + count - len(holes))
        self.active += len(fresh)
        return [*holes, *fresh]

    def start(
        self,
        rows: Sequence[int],
        *,
        owner: int,
        first_sample: int,
        seed: int,
        prompt_tokens: int,
        sampling: Sampling,
    ) -> None:
        """Samples `first_sample`, `first_sample + 1`, ... of one request begin in `rows`."""
        index = np.asarray(rows)
        self.owners[index] = owner
        self.samples[index] = np.arange(first_sample, first_sample + len(rows))
        self._seeds[index] = [(seed + first_sample + i) & 0xFFFF_FFFF_FFFF_FFFF for i in range(len(rows))]
        self._temperatures[index] = sampling.temperature
        self._top_ps[index] = sampling.top_p
        self._limits[index] = sampling.max_tokens
        self._widen_stops(len(sampling.stop_token_ids))
        self._stops[index] = NO_TOKEN
        self._stops[index, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.lengths[index] = prompt_tokens
        self.drawn[index] = 0

    def draws(self, rows: slice | NDArray[np.int64]) -> Draws:
        return Draws(
            seeds=self._seeds[rows],
            steps=self.drawn[rows],
            temperatures=self._temperatures[rows],
            top_ps=self._top_ps[rows],
        )

    def record(
        self, rows: slice | NDArray[np.int64], tokens: NDArray[np.int64], logps: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """Append one token per row; the rows that are finished by it."""
        index = self._rows[rows]
        self.tokens[index, self.drawn[rows]] = tokens
        self.logps[index, self.drawn[rows]] = logps
        self.last[rows] = tokens
        self.drawn[rows] += 1
        return index[self._stopped(index) | (self.drawn[rows] >= self._limits[rows])]

    def finish(self, row: int) -> Finish:
        """Why a finished row is so. A stop token at the limit still counts as a stop."""
        return "stop" if self._stopped(self._rows[row : row + 1])[0] else "length"

    def response(self, row: int) -> tuple[list[int], list[float]]:
        drawn = self.drawn[row]
        return self.tokens[row, :drawn].tolist(), self.logps[row, :drawn].tolist()

    def release(self, rows: Sequence[int]) -> None:
        self._holes = sorted([*self._holes, *rows])

    def rows_of(self, owner: int) -> list[int]:
        mine = np.flatnonzero(self.owners[: self.active] == owner).tolist()
        return [row for row in mine if row not in self._holes]

    def close_holes(self, move: Callable[[int, int], None]) -> None:
        """Leave rows 0 .. active-1 without a hole; `move(source, target)` carries what is kept elsewhere."""
        holes, self._holes = self._holes, []
        while holes:
            self.active -= 1
            if self.active == holes[-1]:
                holes.pop()
                continue
            target = holes.pop(0)
            for array in self._arrays():
                array[target] = array[self.active]
            move(self.active, target)

    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (
            self.lengths, self.last, self.drawn, self.tokens, self.logps, self.owners, self.samples,
            self._seeds, self._temperatures, self._top_ps, self._limits, self._stops,
        )  # fmt: skip

    def _stopped(self, index: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self._stops[index] == self.last[index, None]).any(1)
        return found

    def _widen_stops(self, width: int) -> None:
        missing = width - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
