"""What a person sees of a run: one line per period, and what it came to."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rondo.config import Config
    from rondo.rollout.journal import RecordedPeriod

BAR = 20  # characters


class Console:
    """Prints to standard output; knows nothing but the lines it is shown."""

    def __init__(self, *, total: int) -> None:
        self._total = total
        self._lines: list[dict[str, Any]] = []
        self._first_eval: float | None = None
        self._last_eval: float | None = None
        self._since = time.monotonic()

    def preparing(self, config: Config) -> None:
        schedule, rollout = config.schedule, config.rollout
        self._say(
            f"rondo: {config.model.path}, {rollout.prompts_per_period} prompts x {rollout.group_size} responses "
            f"per period, {schedule.mode} schedule; starting {max(1, len(config.engines.urls) or config.engines.count)}"
            " engine(s) and the trainer ..."
        )

    def begin(self, start: int, parameters: int, rows: int) -> None:
        self._say(f"rondo: {parameters / 1e6:.2f} M parameters, {rows} prompts; from period {start} to {self._total}")
        self._since = time.monotonic()

    def resumed(self, checkpoint: int | None, replayed: int, interrupted: RecordedPeriod | None) -> None:
        origin = "the base model" if checkpoint is None else f"the checkpoint of period {checkpoint}"
        reused = f"; {len(interrupted.settled)} groups of period {interrupted.period} are reused" if interrupted else ""
        self._say(f"rondo: resumed from {origin}; {replayed} journalled periods trained again as recorded{reused}")

    def show(self, line: dict[str, Any]) -> None:
        if "eval_reward" in line:
            self._last_eval = line["eval_reward"]
            self._first_eval = self._last_eval if self._first_eval is None else self._first_eval
        if "period" not in line:
            self._say(f"before training: held-out reward {line['eval_reward']:.3f}")
            return
        self._lines.append(line)
        self._say(self._period(line))

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def diagnosis(self, text: str) -> None:
        """On the screen and in the log."""
        self._say(text)
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def end(self, folder: Path) -> None:
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
        self._say(f"the run is in {folder}, the trained model in {folder / 'model'}")

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
            f"{line['seconds']:5.2f} s  {_clock(left)} left"
        )

    def _say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _lanes(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    lanes: dict[str, dict[str, float]] = {"trainer": {}}
    for line in lines:
        _add(lanes["trainer"], line["trainer_seconds"])
        for number, seconds in enumerate(line["engine_seconds"]):
            _add(lanes.setdefault(f"engine {number}", {}), seconds)
    return lanes


def _add(total: dict[str, float], seconds: dict[str, float]) -> None:
    for state, value in seconds.items():
        total[state] = total.get(state, 0.0) + value


def _shares(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{state} {value / whole:.0%}" for state, value in ordered if value / whole >= 0.005)


def _busy(lanes: Sequence[dict[str, float]], *states: str) -> float:
    whole = sum(sum(lane.values()) for lane in lanes)
    return sum(lane.get(state, 0.0) for lane in lanes for state in states) / whole if whole else 0.0


def _arrow(first: dict[str, Any], last: dict[str, Any], name: str) -> str:
    return f"{first[name]:.3f} -> {last[name]:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
