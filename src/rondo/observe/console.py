"""What a person sees of a run: a live view on a terminal, elsewhere one line per period; and what it came to."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondo.observe.glance import Glance
from rondo.observe.live_view import LiveView, clock
from rondo.observe.verdict import judge, mean_period

if TYPE_CHECKING:
    from rich.console import Console as Terminal

    from rondo.config import Config
    from rondo.rollout.journal import RecordedPeriod

BAR = 20  # characters
STEP_SECONDS = 10.0  # a preparation that lasts longer says so, and again


class Console:
    """Prints to standard output; knows nothing but the lines it is shown and the glances it may take."""

    def __init__(self, *, total: int, synchronous: bool = False, ranks: int = 1) -> None:
        self._total = total
        self._synchronous = synchronous
        self._ranks = ranks
        self._lines: list[dict[str, Any]] = []
        self._first_eval: float | None = None
        self._last_eval: float | None = None
        self._since = time.monotonic()
        self._glance: Callable[[], Glance] | None = None
        self._terminal = _terminal()
        self._live: LiveView | None = None
        self._drawn = 0.0
        self._name = "run"

    def preparing(self, config: Config) -> None:
        schedule, rollout = config.schedule, config.rollout
        self._name = config.run.name
        self._say(
            f"rondo: {config.model.path}, {rollout.prompts_per_period} prompts x {rollout.group_size} responses "
            f"per period, {schedule.mode} schedule; starting {max(1, len(config.engines.urls) or config.engines.count)}"
            " engine(s) and the trainer ..."
        )

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Something that has to be done before the run begins; where it takes long, a person hears of it."""
        done, began = threading.Event(), time.monotonic()

        def tell() -> None:
            while not done.wait(STEP_SECONDS):
                self._say(f"{what}: {time.monotonic() - began:.0f} s so far")

        if self._terminal is not None:
            with self._terminal.status(f"{what} ..."):
                yield
            return
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()

    def watch(self, glance: Callable[[], Glance]) -> None:
        """From `begin` on the live view looks through this."""
        self._glance = glance

    def begin(self, start: int, parameters: int, rows: int) -> None:
        self._say(f"rondo: {parameters / 1e6:.2f} M parameters, {rows} prompts; from period {start} to {self._total}")
        self._since = time.monotonic()
        if self._terminal is not None and self._glance is not None:
            self._live = LiveView(self._terminal, self._glance, start=start, total=self._total, name=self._name)
            self._live.start()

    def resumed(self, checkpoint: int | None, replayed: int, interrupted: RecordedPeriod | None) -> None:
        origin = "the base model" if checkpoint is None else f"the checkpoint of period {checkpoint}"
        reused = f"; {len(interrupted.settled)} groups of period {interrupted.period} are reused" if interrupted else ""
        self._say(f"rondo: resumed from {origin}; {replayed} journalled periods trained again as recorded{reused}")

    def show(self, line: dict[str, Any]) -> None:
        if "eval_reward" in line:
            self._last_eval = line["eval_reward"]
            self._first_eval = self._last_eval if self._first_eval is None else self._first_eval
        if "period" in line:
            self._lines.append(line)
        if self._live is not None:
            self._live.show(line)
        elif "period" in line:
            self._say(self._period(line))
        else:
            self._say(f"before training: held-out reward {line['eval_reward']:.3f}")

    def note(self, text: str) -> None:
        self._say(f"rondo: {text}")

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")
        if self._live is not None:
            self._live.warn(text)

    def diagnosis(self, text: str) -> None:
        """On the screen and in the log."""
        self._say(text)
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        """The terminal is the shell's again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def take_seconds(self) -> float:
        """Processor time spent on the live view since the last call."""
        spent = self._live.seconds if self._live is not None else 0.0
        before, self._drawn = self._drawn, spent
        return spent - before

    def end(self, folder: Path) -> None:
        self.close()
        if not self._lines:
            return
        first, last = self._lines[0], self._lines[-1]
        seconds = sum(line["seconds"] for line in self._lines)
        self._say("")
        self._say(f"{len(self._lines)} periods in {seconds:.0f} s: reward {_arrow(first, last, 'reward_mean')}")
        if self._first_eval is not None and self._last_eval is not None:
            self._say(f"held-out reward {self._first_eval:.3f} -> {self._last_eval:.3f}")
        for name, lane in _lanes(self._lines).items():
            self._say(f"{name:<10} {_shares(lane)}")
        self._say(f"engine and trainer log-probs differ by {last.get('logp_gap_mean', 0.0):.1e} per token")
        mean = mean_period(self._lines, ranks=self._ranks, synchronous=self._synchronous)
        if mean is not None:
            verdict = judge(mean)
            self._say(verdict.headline)
            self._say(verdict.advice)
        self._say(f"the run is in {folder}, the trained model in {folder / 'model'}")
        self._say(f"look at it: rondo report {_short(folder)}")

    def _period(self, line: dict[str, Any]) -> str:
        done = line["period"] + 1
        elapsed = time.monotonic() - self._since
        left = elapsed / len(self._lines) * (self._total - done)
        reward = line["reward_mean"]
        filled = round(max(0.0, min(1.0, reward)) * BAR)
        held_out = f"held-out {line['eval_reward']:.3f}" if "eval_reward" in line else " " * 14
        return (
            f"period {done:>4}/{self._total}  reward {reward:6.3f} {'█' * filled}{'·' * (BAR - filled)}  {held_out}  "
            f"length {line['length_mean']:5.1f}  engines {_busy(line['engine_seconds'], 'generating'):4.0%}  "
            f"trainer {_busy([line['trainer_seconds']], 'training', 'stepping'):4.0%}  "
            f"{line['seconds']:5.2f} s  {clock(left)} left"
        )

    def _say(self, text: str) -> None:
        if self._terminal is not None:  # above the live view
            self._terminal.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _terminal() -> Terminal | None:
    """The terminal, where there is one that can be drawn on; not under CI, whose logs are read later."""
    if os.environ.get("CI") or not sys.stdout.isatty():
        return None
    from rich.console import Console as Terminal

    terminal = Terminal(file=sys.stdout)
    return terminal if terminal.is_terminal and not terminal.is_dumb_terminal else None


def _lanes(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    lanes: dict[str, dict[str, float]] = {"trainer": {}}
    for line in lines:
        _add(lanes["trainer"], line["trainer_seconds"])
        for number, seconds in enumerate(line["engine_seconds"]):
            _add(lanes.setdefault(f"engine {number}", {}), seconds)
    return lanes


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for state, value in seconds.items():
        total[state] = total.get(state, 0.0) + value


def _shares(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{state} {value / whole:.0%}" for state, value in ordered if value / whole >= 0.005)


def _busy(lanes: Sequence[dict[str, float]], *states: str) -> float:
    whole = sum(sum(lane.values()) for lane in lanes)
    return sum(lane.get(state, 0.0) for lane in lanes for state in states) / whole if whole else 0.0


def _arrow(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> str:
    return f"{first[name]:.3f} -> {last[name]:.3f}"


def _short(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
