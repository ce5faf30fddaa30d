"""A run's folder as a run would have left it, without running one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from rondo.observe.lane import Lane
from rondo.observe.metrics import Tally
from rondo.observe.recorder import Recorder
from rondo.observe.spans import SpanBook
from rondo.types import Moments
from tests.conftest import make_group

# A response that tries to break out of whatever it is put into.
EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)> <!-- \u2028"
CONFIG = {
    "run": {"name": "mine"}, "schedule": {"periods": 2}, "trainer": {"ranks": 1}, "model": {"path": EVIL},
    "algorithm": {"name": "grpo"},
}  # fmt: skip


class RecordedRun:
    """Time moves by hand: every period has its groups answered in 1.5 s, then three micro-steps of a second each."""

    def __init__(self, folder: Path, *, mode: str = "periodic", groups: int = 6) -> None:
        folder.mkdir()
        self.folder = folder
        self.period = 0
        self.groups = groups
        self.now = 10.0
        clock = lambda: self.now  # noqa: E731
        self.engines = [Lane(clock=clock) for _ in range(2)]
        seats = [(f"http://here:{number}", lane) for number, lane in enumerate(self.engines)]
        self.spans = SpanBook(folder, seats=lambda: seats, clock=clock)
        self.trainer = Lane("bookkeeping", clock=clock)
        self.book = Recorder(
            folder=folder, lane=self.trainer, spans=self.spans, trainer_tally=Tally, counters=dict, samples=16,
            decode=lambda ids: EVIL if len(ids) == 1 else f"{len(ids)} tokens", show=lambda line: None, clock=clock,
        )  # fmt: skip
        self.book.begin()
        config = {**CONFIG, "schedule": {"mode": mode, "periods": 2}}
        (folder / "config.json").write_text(json.dumps(config))

    def live(self) -> None:
        """One period."""
        for engine in self.engines:
            engine.switch("generating")
        self.trainer.switch("waiting for first group")
        start = self.now
        self.now = start + 1.5
        for index in range(self.groups):
            self._see(index, start)
        third = self.groups // 3
        for number in range(3):
            indices = list(range(third * number, third * (number + 1)))
            with self.trainer.doing("training", indices, 12):
                self.now += 1
            self.engines[number % 2].switch("idle")
        with self.trainer.doing("publishing"):
            self.now += 0.5
            self.trainer.mark("bucket", self.now - 0.4, self.now - 0.1, 0, 10)
        self.trainer.switch("bookkeeping")
        self.book.finish(self.period)
        self.period += 1

    def _see(self, index: int, start: float) -> None:
        group = make_group(index=index, period=self.period)
        moments = Moments(sent=start, engine=(start + 0.25, start + 0.5, start + 1))
        answer = dataclasses.replace(group.answer, engine=f"http://here:{index % 2}", moments=moments)
        prompt = dataclasses.replace(group.prompt, text="1 < 2 & 3" if index else "what is first?")
        times = {"asked_at": start, "answered_at": start + 1.1, "scored_at": start + 1.5}
        rewards = (0.0, 1.0 if self.period % 2 else 0.5)
        self.book.saw(dataclasses.replace(group, answer=answer, prompt=prompt, rewards=rewards, **times), True)


def recorded(folder: Path, mode: str = "periodic", *, periods: int = 2, groups: int = 6) -> Path:
    run = RecordedRun(folder, mode=mode, groups=groups)
    for _ in range(periods):
        run.live()
    return folder
