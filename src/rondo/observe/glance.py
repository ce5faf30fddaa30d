"""What a run is doing at this moment, for whoever looks: nothing here is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rondo.observe.lane import Lane
    from rondo.observe.recorder import Recorder
    from rondo.observe.spans import SpanBook


@dataclass(frozen=True, kw_only=True)
class EngineGlance:
    name: str
    load: int  # samples asked for and not answered yet
    slots: int
    version: int  # of the weights that every engine confirmed last
    seconds: Mapping[str, float]  # per state, in this period so far


@dataclass(frozen=True, kw_only=True)
class Glance:
    period: int
    doing: str  # what the trainer does
    seconds: Mapping[str, float]  # of the trainer per state, in this period so far
    groups: int  # ready so far
    total: int
    tokens: int  # of their responses
    engines: Sequence[EngineGlance] = field(default_factory=list)


class Watch:
    """Looks at the parts of a run from any thread; they need not know."""

    def __init__(
        self,
        *,
        lane: Lane,
        spans: SpanBook,
        recorder: Recorder,
        loads: Callable[[], Mapping[str, tuple[int, int]]],
        version: Callable[[], int],
        total: int,
    ) -> None:
        self._lane = lane
        self._spans = spans
        self._recorder = recorder
        self._loads = loads  # by address: in flight, slots
        self._version = version
        self._total = total

    def __call__(self) -> Glance:
        loads, version = self._loads(), self._version()
        engines = [
            EngineGlance(
                name=name.replace("-", " "),
                load=loads[url][0],
                slots=loads[url][1],
                version=version,
                seconds=lane.peek(),
            )
            for name, (url, lane) in self._spans.engines().items()
            if url in loads
        ]
        return Glance(
            period=self._recorder.period,
            doing=self._lane.state,
            seconds=self._lane.peek(),
            groups=self._recorder.groups,
            total=self._total,
            tokens=self._recorder.tokens,
            engines=engines,
        )
