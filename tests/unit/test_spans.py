"""Spans: on one clock, written once per period, read back as they were; and time that adds up, whatever happened."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rondo.observe.clock import Offset
from rondo.observe.idle import ENGINE_STATES, TRAINER_STATES, account
from rondo.observe.lane import Lane, on_our_clock, since
from rondo.observe.spans import PeriodSpans, Span, SpanBook, read_periods
from rondo.types import Moments
from tests.conftest import make_group


def test_another_ranks_stretches_are_put_on_our_clock_and_cut_at_the_periods_start():
    stretches = [("idle", 1.0, 2.0, ()), ("training", 2.0, 4.0, ([1], 6)), ("idle", 4.0, 5.0, ())]
    far = on_our_clock(stretches, theirs=4.0, ours=1004.0)
    assert far[1] == ("training", 1002.0, 1004.0, ([1], 6))
    near = on_our_clock(stretches, theirs=4.0, ours=4.003)
    assert near == stretches  # the same machine: what differs is the message's way
    cut = since(2.5, near)
    assert [(state, begun, until) for state, begun, until, _ in cut.stretches] == [
        ("training", 2.5, 4.0),
        ("idle", 4.0, 5.0),
    ]
    assert (cut.start, cut.end) == (2.5, 5.0)


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_period_is_read_back_as_it_was_lived(tmp_path):
    clock = Time()
    engine, trainer = Lane(clock=clock), Lane("bookkeeping", clock=clock)
    book = SpanBook(tmp_path, seats=lambda: [("http://here:1", engine)], clock=clock)
    trainer.switch("waiting for first group")
    engine.switch("generating")
    clock.now += 2
    group = make_group(index=7)
    answer = dataclasses.replace(
        group.answer, moments=Moments(sent=100.1, engine=(100.5, 101.0, 101.5)), engine="http://here:1"
    )
    book.saw(dataclasses.replace(group, answer=answer, asked_at=100.0, answered_at=101.6, scored_at=102.0), True)
    engine.switch("idle")
    with trainer.doing("training", [7], 6):
        clock.now += 1
    trainer.mark("bucket", 102.5, 102.75, 0, 12)
    written = book.close_period(4, {"trainer": trainer.cut(103.0), **book.cut(103.0)})
    (read,) = read_periods(tmp_path)
    assert (read.lanes, read.marks, read.start) == (written.lanes, written.marks, pytest.approx(written.start))
    assert (read.period, read.seconds, read.engines) == (4, 3.0, {"engine-0": "http://here:1"})
    spans = {span.kind: span for span in read.spans()}
    assert {kind: (span.lane, span.start, span.end) for kind, span in spans.items() if kind != "idle"} == {
        "waiting for first group": ("trainer", 0.0, 2.0),
        "training": ("trainer", 2.0, 3.0),
        "bucket": ("trainer", 2.5, 2.75),
        "generating": ("engine-0", 0.0, 2.0),
        "line": ("queue", 0.0, pytest.approx(0.1)),
        "request": ("engine-0", pytest.approx(0.1), pytest.approx(1.6)),
        "prefill": ("engine-0", 0.5, 1.0),
        "decode": ("engine-0", 1.0, 1.5),
        "reward": ("rewards", pytest.approx(1.6), 2.0),
        "ready": ("queue", 2.0, 2.0),
    }
    assert spans["training"].about == {"groups": [7], "tokens": 6}
    assert spans["bucket"].about == {"number": 0, "bytes": 12}


def test_engines_come_go_and_return_at_another_address_and_their_time_still_adds_up(tmp_path):
    clock = Time()
    trainer, first, second = (Lane(state, clock=clock) for state in ("training", "generating", "generating"))
    seats = [("http://a", first), ("http://b", second)]
    book = SpanBook(tmp_path, seats=lambda: seats, clock=clock)
    answer = dataclasses.replace(make_group().answer, engine="http://b")

    def period(number: int) -> PeriodSpans:
        clock.now += 1
        book.saw(dataclasses.replace(make_group(index=number), answer=answer), True)
        return book.close_period(number, {"trainer": trainer.cut(clock.now), **book.cut(clock.now)})

    assert period(0).engines == {"engine-0": "http://a", "engine-1": "http://b"}
    second.switch("lost")
    clock.now += 1
    second.switch("idle")
    seats[1] = ("http://c", second)  # restarted
    returned = period(1)
    assert returned.engines == {"engine-0": "http://a", "engine-1": "http://c"}
    assert account(returned).engines["engine-1"] == {"away": 1.0, "starved": 1.0}
    del seats[0]  # leaves
    clock.now += 1
    seats.append(("http://d", Lane(clock=clock)))  # joins
    changed = period(2)
    assert set(changed.engines) == {"engine-0", "engine-1", "engine-2"}
    assert account(changed).engines["engine-2"] == {"away": 1.0, "starved": 1.0}
    assert set(period(3).engines) == {"engine-1", "engine-2"}
    assert [group["engine"] for spans in read_periods(tmp_path) for group in spans.groups] == ["engine-1"] * 4


def test_an_engine_that_says_nothing_still_has_its_request(tmp_path):
    book, trainer = SpanBook(tmp_path), Lane()
    book.saw(make_group(), True)
    spans = list(book.close_period(0, {"trainer": trainer.cut()}).spans())
    assert [span.kind for span in spans if span.kind != "idle"] == ["line", "request", "reward"]


def test_a_torn_last_line_is_left_out(tmp_path):
    book, trainer = SpanBook(tmp_path), Lane()
    book.close_period(0, {"trainer": trainer.cut()})
    with (tmp_path / "spans.jsonl").open("a") as file:
        file.write('{"period": 1, "sta')
    assert [period.period for period in read_periods(tmp_path)] == [0]


def test_memory_is_bounded_and_what_was_left_out_is_counted(monkeypatch):
    monkeypatch.setattr("rondo.observe.lane.LONGEST", 3)
    clock = Time()
    lane = Lane("a", clock=clock)
    for state in "babab":
        clock.now += 1
        lane.switch(state)
    cut = lane.cut()
    assert (len(cut.stretches), cut.dropped) == (3, 2)
    assert cut.seconds == {"a": 3.0, "b": 2.0}  # whole all the same


def test_an_offset_is_measured_by_the_quickest_answer():
    clock = Time()
    delays = iter([(3.0, 1.0), (0.1, 0.1), (2.0, 0.5), (1.0, 4.0), (2.0, 2.0)])  # there, back
    offset = Offset(clock=clock)
    assert offset.stale

    async def ask() -> float:
        there, back = next(delays)
        clock.now += there
        theirs = clock.now - 1000.0
        clock.now += back
        return theirs

    asyncio.run(offset.measure(ask))
    assert not offset.stale
    assert offset.error == pytest.approx(0.1)
    assert offset.ours(5.0) == pytest.approx(1005.0, abs=0.1)


states = st.sampled_from([state for state in TRAINER_STATES if state != "waiting for rewards"])


def laid_out(name: str, pieces: list[tuple[str, int]], seconds: int) -> list[Span]:
    spans, now = [], 0.0
    for kind, length in pieces:
        end = min(float(seconds), now + length)
        if end > now:
            spans.append(Span(kind=kind, lane=name, start=now, end=end))
        now = end
    return [*spans, Span(kind="idle" if name != "trainer" else "bookkeeping", lane=name, start=now, end=float(seconds))]


@given(
    trainer=st.lists(st.tuples(states, st.integers(0, 9)), max_size=12),
    engines=st.lists(
        st.lists(st.tuples(st.sampled_from(["generating", "idle"]), st.integers(0, 9)), max_size=8), max_size=3
    ),
)
def test_every_second_of_every_lane_has_one_name(trainer, engines):
    names = [f"engine-{number}" for number in range(len(engines))]
    lanes = {"trainer": laid_out("trainer", trainer, 60)}
    lanes |= {name: laid_out(name, pieces, 60) for name, pieces in zip(names, engines, strict=True)}
    spans = PeriodSpans(
        period=0, start=0.0, seconds=60.0, engines=dict.fromkeys(names, ""), lanes=lanes, marks=[], groups=[]
    )
    found = account(spans)
    assert sum(found.trainer.values()) == pytest.approx(60.0)
    assert set(found.trainer) <= set(TRAINER_STATES)
    for seconds in found.engines.values():
        assert sum(seconds.values()) == pytest.approx(60.0)
        assert set(seconds) <= set(ENGINE_STATES)
    assert found.overlap <= min(found.trainer.get("training", 0.0), 60.0) + 1e-9


def test_what_idle_time_means_follows_from_what_the_others_do():
    trainer = [
        ("publishing", 1), ("evaluating", 2), ("bookkeeping", 1), ("waiting for first group", 4), ("training", 4),
        ("waiting for groups", 4), ("training", 3), ("stepping", 1), ("publishing", 2),
    ]  # fmt: skip
    engine = [("idle", 1), ("generating", 2), ("idle", 1), ("generating", 5), ("idle", 1), ("generating", 4)]
    lanes = {"trainer": laid_out("trainer", trainer, 22), "engine-0": laid_out("engine-0", engine, 22)}
    groups = [
        {"sent": 4.0, "arrived": 7.0, "scored": 8.0},
        {"sent": 4.0, "arrived": 14.0, "scored": 16.0},
    ]
    found = account(
        PeriodSpans(period=0, start=0.0, seconds=22.0, engines={"engine-0": ""}, lanes=lanes, marks=[], groups=groups)
    )
    assert found.trainer == {
        "publishing": 3.0, "evaluating": 2.0, "bookkeeping": 1.0, "waiting for first group": 4.0, "training": 7.0,
        "waiting for groups": 2.0, "waiting for rewards": 2.0, "stepping": 1.0,
    }  # fmt: skip
    assert found.engines["engine-0"] == {
        "publishing": 3.0, "evaluating": 2.0, "between periods": 1.0, "generating": 9.0, "starved": 1.0,
        "idle tail": 6.0,
    }  # fmt: skip
    assert (found.overlap, found.generation, found.first_group, found.backlog) == (3.0, 10.0, 4.0, 3.0)


def test_the_file_stays_one_line_per_period(tmp_path):
    book, trainer = SpanBook(tmp_path), Lane()
    for period in range(3):
        book.close_period(period, {"trainer": trainer.cut()})
    lines = (tmp_path / "spans.jsonl").read_text().splitlines()
    assert [json.loads(line)["period"] for line in lines] == [0, 1, 2]
