"""One engine's slots, in decode steps instead of seconds: which samples run, when they end, what a stretch amounts to.

The same rules as the embedded engine's: samples take slots in the order of their requests, a group's prompt is run
once, the first token comes with the prompt, and a slot that falls free is filled before the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple


class Amount(NamedTuple):
    """What is paid for, to be multiplied by an EngineCost's seconds."""

    steps: int = 0
    rows: int = 0
    keys: float = 0.0
    prefills: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class _Job:
    prompt: int
    lengths: Sequence[int]
    admitted: int = 0
    ended: int = 0


class Decoder:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.step = 0
        self._jobs: dict[int, _Job] = {}
        self._line: deque[int] = deque()  # jobs with samples that have no slot yet
        self._ends: list[tuple[int, int, int]] = []  # heap: the step after which a sample ends, its job, its keys then
        self._keys = 0  # held by the running samples together

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def waiting(self) -> bool:
        return bool(self._line)

    def submit(self, job: int, prompt: int, lengths: Sequence[int]) -> None:
        self._jobs[job] = _Job(prompt, lengths)
        self._line.append(job)

    def admit(self) -> Amount:
        """Fill the free slots; the first token of each sample is drawn with its prompt."""
        prefills = tokens = 0
        while self._line and len(self._ends) < self.slots:
            name = self._line[0]
            job = self._jobs[name]
            if job.admitted == 0:
                prefills += 1
                tokens += job.prompt
            count = min(self.slots - len(self._ends), len(job.lengths) - job.admitted)
            for length in job.lengths[job.admitted : job.admitted + count]:
                heappush(self._ends, (self.step + max(length - 1, 0), name, job.prompt + max(length, 1)))
                self._keys += job.prompt + 1
            job.admitted += count
            if job.admitted == len(job.lengths):
                self._line.popleft()
        return Amount(prefills=prefills, prompt_tokens=tokens)

    def next_end(self) -> int:
        """Steps until a sample ends; 0 where one already has."""
        return self._ends[0][0] - self.step

    def ahead(self, steps: int) -> Amount:
        """What the next so many steps amount to, if nothing ends before."""
        rows = len(self._ends)
        return Amount(steps=steps, rows=steps * rows, keys=steps * self._keys + rows * steps * (steps - 1) / 2)

    def run(self, steps: int) -> list[int]:
        """Decode; the jobs whose last sample ended. Not further than the next end."""
        self._keys += steps * len(self._ends)
        self.step += steps
        done = []
        while self._ends and self._ends[0][0] <= self.step:
            _, name, keys = heappop(self._ends)
            self._keys -= keys
            job = self._jobs[name]
            job.ended += 1
            if job.ended == len(job.lengths):
                done.append(name)
                del self._jobs[name]
        return done
