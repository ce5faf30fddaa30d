"""Spans: what happened when, of every process, on one clock; `spans.jsonl` holds one line per period.

The clock is that of trainer rank 0 (monotonic, set to the time of day once, when the run starts). Engines tell their
own moments with every answer; the client turns them into this clock with an offset it measured (clock.py). Inside a
period times are seconds since its start. docs/observe.md describes the file; `read_periods` reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rondo.observe.lane import Cut, Lane
from rondo.types import Group

SPANS = "spans.jsonl"
MOST_GROUPS = 100_000  # per period; more are counted, not kept
DIGITS = 6  # microseconds

# What the columns of a group's row mean; moments in the order in which they happen, None where an engine says nothing.
GROUP_COLUMNS = (
    "group", "engine", "asked", "sent", "admitted", "first_token", "finished", "arrived", "scored",
    "prompt_tokens", "response_tokens", "samples", "longest", "reward", "kept",
)  # fmt: skip
MOMENTS = GROUP_COLUMNS[2:9]

# What a lane's stretch or mark is about, by its kind.
DETAILS = {
    "training": ("groups", "tokens"),
    "forward": ("tokens",),
    "backward": ("tokens",),
    "bucket": ("number", "bytes"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    kind: str
    lane: str  # trainer, trainer-1 ..., engine-0 ..., rewards, queue
    start: float  # seconds since the period's start
    end: float
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PeriodSpans:
    """One period as it was recorded. `groups` are rows under GROUP_COLUMNS, in order of arrival."""

    period: int
    start: float  # seconds since 1970
    seconds: float
    engines: Mapping[str, str]  # lane: address
    lanes: Mapping[str, list[Span]]  # each lane's states, without gaps; an engine's: generating or idle
    marks: list[Span]  # what went on during a state: a bucket on its way, forward, backward
    groups: list[dict[str, Any]]
    dropped: int = 0  # what was not kept, for there was too much of it

    def spans(self) -> Iterator[Span]:
        """Everything, flat: states, marks, and each group's way from the request to its micro-step."""
        for lane in self.lanes.values():
            yield from lane
        yield from self.marks
        trained = {index: span for span in self.micro_steps() for index in span.about["groups"]}
        for group in self.groups:
            yield from _way(group, trained.get(group["group"]))

    def micro_steps(self) -> list[Span]:
        """Of all ranks; one after the other."""
        return [
            span
            for name, lane in self.lanes.items()
            if name not in self.engines
            for span in lane
            if span.kind == "training"
        ]


def _way(group: Mapping[str, Any], micro: Span | None) -> Iterator[Span]:
    about = {name: group[name] for name in ("group", "prompt_tokens", "response_tokens", "samples", "reward")}
    engine = group["engine"]
    steps = (
        ("line", "queue", "asked", "sent"),
        ("request", engine, "sent", "arrived"),
        ("prefill", engine, "admitted", "first_token"),
        ("decode", engine, "first_token", "finished"),
        ("reward", "rewards", "arrived", "scored"),
    )
    for kind, lane, begins, ends in steps:
        if group[begins] is not None and group[ends] is not None:
            yield Span(kind=kind, lane=lane, start=group[begins], end=group[ends], about=about)
    if micro is not None:
        yield Span(kind="ready", lane="queue", start=group["scored"], end=micro.start, about=about)


class SpanBook:
    """Collects a period's spans and writes them when it ends. Groups come from the producer's thread."""

    def __init__(
        self,
        folder: Path,
        *,
        seats: Callable[[], Sequence[tuple[str, Lane]]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = folder / SPANS
        self._seats = seats  # the engines of this moment: address and lane
        self._day = time.time() - clock()  # what turns the clock into the time of day
        self._groups: list[tuple[Any, ...]] = []
        self._dropped = 0
        self._seconds = 0.0
        self._lanes: dict[str, tuple[str, Lane]] = {}  # by name: the last address, and the lane
        self._names: dict[str, str] = {}  # by address, of all that ever answered
        self._met = 0

    def engines(self) -> dict[str, tuple[str, Lane]]:
        """By name: address and lane. A lane keeps its name when the engine comes back at another address."""
        names = {id(lane): name for name, (_, lane) in self._lanes.items()}
        for url, lane in self._seats():
            name = names.get(id(lane))
            if name is None:
                name = f"engine-{self._met}"
                self._met += 1
            self._lanes[name] = (url, lane)
            self._names[url] = name
        return dict(self._lanes)

    def cut(self, now: float) -> dict[str, Cut]:
        """All engines' lanes up to this moment; who has left is in it for the last time."""
        lanes = self.engines()
        here = {id(lane) for _, lane in self._seats()}
        self._lanes = {name: one for name, one in lanes.items() if id(one[1]) in here}
        return {name: lane.cut(now) for name, (_, lane) in lanes.items()}

    def saw(self, group: Group, kept: bool) -> None:
        began = time.perf_counter()
        if len(self._groups) >= MOST_GROUPS:
            self._dropped += 1
        else:
            answer = group.answer
            if answer.engine not in self._names:
                self.engines()
            moments = answer.moments
            lengths = [len(response.token_ids) for response in answer.responses]
            self._groups.append(
                (
                    group.index,
                    self._names.get(answer.engine, answer.engine),
                    group.asked_at,
                    *((moments.sent, *moments.engine) if moments else (group.asked_at, None, None, None)),
                    group.answered_at,
                    group.scored_at,
                    len(group.prompt.token_ids),
                    sum(lengths),
                    len(lengths),
                    max(lengths, default=0),
                    sum(group.rewards) / max(1, len(group.rewards)),
                    kept,
                )
            )
        self._seconds += time.perf_counter() - began

    def close_period(self, period: int, lanes: Mapping[str, Cut]) -> PeriodSpans:
        """The period that ends here: `lanes` were all cut at one moment."""
        began = time.perf_counter()
        groups, self._groups = self._groups, []
        engines = {name: url for url, name in self._names.items() if name in lanes}  # the last address of each
        spans = _period(period, lanes, groups, engines, self._day)
        self._write(spans, self._dropped)
        self._dropped = 0
        self._seconds += time.perf_counter() - began
        return spans

    def take_seconds(self) -> float:
        """Time spent in here since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _write(self, spans: PeriodSpans, dropped: int) -> None:
        record = {
            "period": spans.period,
            "start": round(spans.start, DIGITS),
            "seconds": round(spans.seconds, DIGITS),
            "engines": dict(spans.engines),
            "lanes": {name: [_row(span) for span in lane] for name, lane in spans.lanes.items()},
            "marks": [[span.lane, *_row(span)] for span in spans.marks],
            "groups": [[_short(group[name]) for name in GROUP_COLUMNS] for group in spans.groups],
            "dropped": spans.dropped + dropped,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _period(
    period: int, lanes: Mapping[str, Cut], rows: list[tuple[Any, ...]], engines: Mapping[str, str], day: float
) -> PeriodSpans:
    start = next(iter(lanes.values())).start
    end = next(iter(lanes.values())).end

    def spans(name: str, found: list[tuple[str, float, float, tuple[Any, ...]]]) -> list[Span]:
        return [
            Span(
                kind=kind,
                lane=name,
                start=max(0.0, since - start),
                end=until - start,
                about=dict(zip(DETAILS.get(kind, ()), detail, strict=False)),
            )
            for kind, since, until, detail in found
        ]

    groups = []
    for row in rows:
        group = dict(zip(GROUP_COLUMNS, row, strict=True))
        for name in MOMENTS:
            if group[name] is not None:
                group[name] -= start
        groups.append(group)
    return PeriodSpans(
        period=period,
        start=start + day,
        seconds=end - start,
        engines=engines,
        lanes={name: spans(name, cut.stretches) for name, cut in lanes.items()},
        marks=sorted((span for name, cut in lanes.items() for span in spans(name, cut.marks)), key=lambda s: s.start),
        groups=sorted(groups, key=lambda group: float(group["scored"])),
        dropped=sum(cut.dropped for cut in lanes.values()),
    )


def _row(span: Span) -> list[Any]:
    return [span.kind, round(span.start, DIGITS), round(span.end, DIGITS), *span.about.values()]


def _short(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


def read_periods(folder: Path) -> Iterator[PeriodSpans]:
    """The recorded periods of a run, in order; nothing where it has no spans. A torn last line is left out."""
    path = folder / SPANS
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield parse_period(json.loads(line))


def parse_period(record: Mapping[str, Any]) -> PeriodSpans:
    def span(lane: str, row: list[Any]) -> Span:
        kind, start, end, *detail = row
        about = dict(zip(DETAILS.get(kind, ()), detail, strict=False))
        return Span(kind=kind, lane=lane, start=start, end=end, about=about)

    return PeriodSpans(
        period=record["period"],
        start=record["start"],
        seconds=record["seconds"],
        engines=record["engines"],
        lanes={name: [span(name, row) for row in rows] for name, rows in record["lanes"].items()},
        marks=[span(row[0], row[1:]) for row in record["marks"]],
        groups=[dict(zip(GROUP_COLUMNS, row, strict=True)) for row in record["groups"]],
        dropped=record["dropped"],
    )
