"""A simple autoscaling rule: when the trainer waits too much, the user's command is called with +1; when engines idle,
with -1.

Looks at every period's line when it is written (the trainer's thread), decides from the last few, and starts the
command as a process of its own: it never waits for it. One command at a time, and none for a while after it. The
command starts or ends engines in whatever way suits the place; they join and leave by `rondo serve --join` and SIGTERM.
It gets the run's folder as RONDO_RUN, and its output goes to logs/autoscale.log.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.engines.bearer import TOKEN

WAITING = ("waiting for first group", "waiting for groups")
IDLE = ("idle tail", "starved")
RUN = "RONDO_RUN"


@dataclass(frozen=True, kw_only=True)
class Rule:
    wait: float  # share of the trainer's time that it may wait for groups
    idle: float  # share of the engines' time that they may idle
    periods: int  # that are looked at


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of one period."""

    wait: float
    idle: float
    engines: int


def shares_of(line: Mapping[str, Any]) -> Shares:
    trainer: Mapping[str, float] = line["trainer_seconds"]
    lanes: Sequence[Mapping[str, float]] = line["engine_seconds"]
    unused = sum(lane.get(state, 0.0) for lane in lanes for state in IDLE)
    ready = unused + sum(lane.get("generating", 0.0) for lane in lanes)
    return Shares(
        wait=sum(trainer.get(state, 0.0) for state in WAITING) / (sum(trainer.values()) or 1.0),
        idle=unused / (ready or 1.0),
        engines=int(line.get("engines_ready", len(lanes))),
    )


def decide(seen: Sequence[Shares], rule: Rule) -> str:
    """+1, -1, or nothing."""
    if len(seen) < rule.periods:
        return ""
    wait = sum(one.wait for one in seen) / len(seen)
    idle = sum(one.idle for one in seen) / len(seen)
    if wait > rule.wait:
        return "+1"
    # Half of the target: the one that leaves must not be missed at once.
    return "-1" if idle > rule.idle and wait < rule.wait / 2 and seen[-1].engines > 1 else ""


class Autoscaler:
    def __init__(
        self,
        *,
        command: str,
        rule: Rule,
        every: float,
        folder: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._words = shlex.split(command)
        self._rule = rule
        self._every = every
        self._folder = folder
        self._say = say
        self._clock = clock
        self._seen: deque[Shares] = deque(maxlen=rule.periods)
        self._last: float | None = None
        self._running: subprocess.Popen[bytes] | None = None

    def saw(self, line: Mapping[str, Any]) -> None:
        """A period is over."""
        self._seen.append(shares_of(line))
        if not self._reaped() or (self._last is not None and self._clock() - self._last < self._every):
            return
        if change := decide(self._seen, self._rule):
            self._start(change)

    def close(self) -> None:
        if not self._reaped() and self._running is not None:
            self._running.terminate()
            self._running.wait()

    def _start(self, change: str) -> None:
        self._last = self._clock()
        mean = sum(one.wait for one in self._seen) / len(self._seen)
        self._say(f"autoscale {change}: the trainer waited {mean:.0%} of the last {len(self._seen)} periods")
        self._seen.clear()  # what follows is another deployment
        environment = {name: value for name, value in os.environ.items() if name != TOKEN} | {RUN: str(self._folder)}
        with (self._folder / "logs" / "autoscale.log").open("ab") as log:
            try:
                self._running = subprocess.Popen(
                    [*self._words, change], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
            except OSError as error:
                self._say(f"engines.autoscale_command {self._words[0]} cannot be started: {error.strerror or error}")

    def _reaped(self) -> bool:
        """Whether no command is running; one that failed is said once."""
        if self._running is None:
            return True
        code = self._running.poll()
        if code is None:
            return False
        if code:
            log = self._folder / "logs" / "autoscale.log"
            self._say(f"engines.autoscale_command ended with exit code {code}: see {log}")
        self._running = None
        return True
