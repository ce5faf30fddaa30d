"""The live view: a few lines at the foot of the terminal, drawn again twice a second by a thread of its own.

Consumes glances and the lines of finished periods; produces nothing but what is seen. Whatever is printed meanwhile
appears above it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rondo.observe.glance import EngineGlance, Glance

PER_SECOND = 2
BAR = 32  # characters
SPARK = 40
BLOCKS = "▁▂▃▄▅▆▇█"

COLOURS = {
    "training": "orange3", "stepping": "dark_orange3", "packing": "grey50", "waiting for first group": "grey42",
    "waiting for groups": "grey30", "publishing": "medium_purple2", "evaluating": "dark_cyan", "saving": "grey50",
    "bookkeeping": "grey23", "generating": "cornflower_blue", "idle": "grey30",
}  # fmt: skip
BUSY = ("training", "stepping", "generating", "evaluating")


class LiveView:
    def __init__(self, terminal: Terminal, glance: Callable[[], Glance], *, start: int, total: int, name: str) -> None:
        self._glance = glance
        self._total = total
        self._first = start
        self._name = name
        self._began = time.monotonic()
        self._rewards: deque[float] = deque(maxlen=SPARK)
        self._last: Mapping[str, Any] = {}
        self._held_out: float | None = None
        self._warning: tuple[float, str] | None = None
        self.seconds = 0.0  # processor time spent on drawing
        self._over = threading.Event()
        self._drawer = threading.Thread(target=self._draw, name="live-view", daemon=True)
        self._live = Live(
            get_renderable=self.render,
            console=terminal,
            auto_refresh=False,
            transient=True,  # what is left at the end is the summary
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self) -> None:
        self._live.start()
        self._live.console.show_cursor(True)  # should this process be killed, the terminal has lost nothing
        self._drawer.start()

    def stop(self) -> None:
        self._over.set()
        self._drawer.join()
        self._live.stop()

    def _draw(self) -> None:
        while not self._over.wait(1 / PER_SECOND):
            self._live.refresh()
            self.seconds = time.thread_time()

    def show(self, line: Mapping[str, Any]) -> None:
        self._held_out = line.get("eval_reward", self._held_out)
        if "period" in line:
            self._last = line
            self._rewards.append(line["reward_mean"])

    def warn(self, text: str) -> None:
        self._warning = (time.monotonic(), text)

    def render(self) -> RenderableType:
        glance = self._glance()
        rows = Table.grid(padding=(0, 2))
        rows.add_row(self._label(self._name), self._progress(glance), self._left(glance))
        rows.add_row(
            self._label("trainer"), lane_bar(glance.seconds), Text.assemble(_share(glance.seconds), "  ", glance.doing)
        )
        for engine in glance.engines:
            rows.add_row(self._label(engine.name), lane_bar(engine.seconds), _engine(engine))
        rows.add_row(
            self._label("groups"), _filled(glance.groups, glance.total, "cornflower_blue"), self._speed(glance)
        )
        if self._rewards:
            rows.add_row(self._label("reward"), Text(sparkline(self._rewards), style="green"), self._reward())
        parts: list[RenderableType] = [rows]
        if self._warning is not None:
            ago = time.monotonic() - self._warning[0]
            parts.append(Text(f"! {self._warning[1]} ({ago:.0f} s ago)", style="yellow", overflow="ellipsis"))
        return Group(*parts)

    def _label(self, text: str) -> Text:
        return Text(text, style="bold", overflow="ellipsis", no_wrap=True)

    def _progress(self, glance: Glance) -> Text:
        return _filled(glance.period, self._total, "white")

    def _left(self, glance: Glance) -> Text:
        done = glance.period - self._first
        text = f"period {min(glance.period + 1, self._total)}/{self._total}"
        if done > 0:
            left = (time.monotonic() - self._began) / done * (self._total - glance.period)
            text += f"  {clock(left)} left"
        return Text(text)

    def _speed(self, glance: Glance) -> Text:
        seconds = sum(glance.seconds.values())
        speed = glance.tokens / seconds if seconds > 0.2 else 0.0
        return Text(f"{glance.groups}/{glance.total}  {speed:,.0f} tokens/s")

    def _reward(self) -> Text:
        last = self._last
        words = [f"{last['reward_mean']:.3f}"]
        if self._held_out is not None:
            words.append(f"held-out {self._held_out:.3f}")
        words.append(f"length {last['length_mean']:.1f}")
        if "logp_gap_mean" in last:
            words.append(f"gap {last['logp_gap_mean']:.0e}")
        return Text("  ".join(words))


def lane_bar(seconds: Mapping[str, float]) -> Text:
    """A lane's time so far, in the order in which states are worth seeing."""
    whole = sum(seconds.values()) or 1.0
    bar, drawn, sum_so_far = Text(no_wrap=True), 0, 0.0
    for state in [name for name in COLOURS if name in seconds]:
        sum_so_far += seconds[state]
        upto = round(BAR * sum_so_far / whole)
        bar.append(("█" if state in BUSY else "░") * (upto - drawn), style=COLOURS[state])
        drawn = upto
    return bar.append("░" * (BAR - drawn), style="grey23")


def sparkline(values: Sequence[float] | deque[float]) -> str:
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[3] * len(values)
    return "".join(BLOCKS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _filled(done: int, total: int, style: str) -> Text:
    full = round(BAR * done / total) if total else 0
    return Text.assemble(("━" * full, style), ("─" * (BAR - full), "grey30"))


def _share(seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values())
    busy = sum(value for state, value in seconds.items() if state in BUSY)
    return f"{busy / whole if whole else 0:4.0%} busy"


def _engine(engine: EngineGlance) -> Text:
    return Text(f"{_share(engine.seconds)}  {engine.load}/{engine.slots} samples  version {engine.version}")
