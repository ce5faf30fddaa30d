"""The report and the trace: what is gathered, what is refused, and that no text of a run ever becomes markup."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

import pytest

from rondo.errors import UserError
from rondo.observe.spans import read_periods
from rondo.observe.trace import trace_events, write_trace
from rondo.observe.verdict import judge, mean_period
from rondo.report.data import gather, spread
from rondo.report.page import render
from tests.runs import EVIL, recorded


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as two periods would have left it, with a response that tries to break out."""
    return recorded(tmp_path / "first")


def test_a_page_holds_its_data_whole_and_nothing_of_it_as_markup(run):
    data = gather(run)
    page = render(data)
    assert EVIL not in page
    assert page.count("<script") == 2  # its data, its code
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(embedded[1])["runs"][0]["samples"][1]["completion"] == EVIL
    assert "\u2028" not in embedded[1]


def test_a_page_fetches_nothing_from_anywhere(run):
    page = render(gather(run))
    assert "default-src 'none'" in page
    assert "connect-src" not in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]+"', page)
    assert "connect-src 'self'" in render(gather(run, live=True))


def test_a_page_says_in_words_what_happened(run, tmp_path):
    data = gather(run, against=recorded(tmp_path / "second", "synchronous"))
    verdict = data["runs"][0]["verdict"]
    assert verdict["headline"].startswith("Generation and training overlapped for")
    assert data["comparison"].startswith("Periodic is 1.00 times as fast as synchronous")
    assert [len(one["groups"]) for one in data["runs"][1]["timelines"]] == [6, 6]


def test_numbers_that_json_does_not_know_become_gaps(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write((run / "metrics.jsonl").read_text().splitlines()[0].replace('"groups": 6.0', '"groups": NaN') + "\n")
    assert '"groups":null' in render(gather(run))


def test_a_folder_without_a_run_is_named(tmp_path, run):
    with pytest.raises(UserError, match="holds no run: give the folder"):
        gather(tmp_path)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no finished period to report yet"):
        gather(run)
    assert gather(run, live=True)["runs"][0]["verdict"] is None


def test_a_long_run_keeps_the_timelines_that_fit_with_the_first_and_the_last():
    assert spread([5] * 10, 1000) == list(range(10))
    kept = spread([100] * 50, 1000)
    assert (kept[0], kept[-1]) == (0, 49)
    assert 5 <= len(kept) <= 10
    assert spread([10**9] * 7, 10) == [0, 6]
    assert spread([], 10) == []


def test_a_trace_has_whole_events_that_nest_in_every_thread(run, tmp_path):
    events = list(trace_events(list(read_periods(run))))
    assert write_trace(run, tmp_path / "trace.json") == len(events)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == events
    named = {event["pid"] for event in events if event["ph"] == "M"}
    drawn = sorted((event for event in events if event["ph"] == "X"), key=lambda event: (event["pid"], event["tid"]))
    assert {event["pid"] for event in drawn} == named
    assert {"request", "prefill", "decode", "reward", "training", "publishing", "bucket", "ready"} <= {
        event["name"] for event in drawn
    }
    for _, thread in groupby(drawn, key=lambda event: (event["pid"], event["tid"])):
        open_until: list[int] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
            open_until.append(event["ts"] + event["dur"])


LINE = {
    "seconds": 41.0, "trainer_seconds": {"training": 12.0, "waiting for groups": 24.0, "waiting for first group": 3.0},
    "engine_seconds": [{"generating": 38.0}], "overlap_seconds": 11.0, "generation_seconds": 38.0, "tail_seconds": 3.0,
    "backlog_seconds": 1.0, "micro_steps": 12,
}  # fmt: skip


def lived(generation: float, **seconds: float) -> dict[str, object]:
    """A period's line with other seconds of the trainer: waiting_for_groups=24."""
    states = {name.replace("_", " "): value for name, value in seconds.items()}
    return LINE | {"trainer_seconds": states, "generation_seconds": generation}


@pytest.mark.parametrize(
    ("line", "bound", "words"),
    [
        (LINE, "generation", "a second engine on a device of its own would cut a period from 41 s to 22 s"),
        (LINE | {"engine_seconds": [{}] * 3}, "generation", "one more engine on a device of its own"),
        (LINE | {"tail_seconds": 30.0}, "tail", "the last tenth of the groups takes 30 s"),
        (lived(15, training=39), "training", "a second trainer rank"),
        (lived(10, training=12, waiting_for_rewards=24), "rewards", "rewards.workers"),
        (lived(12, training=12, publishing=25), "publication", "weights.transport"),
        (lived(12, training=12, evaluating=25), "evaluation", "eval.every"),
        (lived(30, training=12, waiting_for_first_group=20), "first group", "engines.slots"),
        (lived(1, training=1, bookkeeping=39), "nothing", "Nothing stands out"),
    ],
)
def test_a_verdict_names_what_bounds_the_run_and_what_to_change(line, bound, words):
    verdict = judge(mean_period([line]))
    assert verdict.bound == bound
    assert words in verdict.advice


def test_a_synchronous_run_is_told_what_the_other_schedule_would_bring():
    line = lived(20, training=20, waiting_for_groups=20)
    verdict = judge(mean_period([line | {"overlap_seconds": 0.0}], synchronous=True))
    assert verdict.bound == "schedule"
    assert 'schedule.mode = "periodic" would cut a period from 41 s to 23 s' in verdict.advice
    assert "did not overlap" in verdict.headline


def test_the_share_of_the_possible_overlap_is_that_of_the_shorter_side():
    verdict = judge(mean_period([LINE]))
    assert verdict.overlap == pytest.approx(11 / 12)
    assert "11.0 s of every 41 s period: 92% of what is possible" in verdict.headline
