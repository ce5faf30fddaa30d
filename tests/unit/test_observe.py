"""Time that adds up, metrics that reduce, and what is written down."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import pty
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as Terminal

from rondo.observe.console import Console
from rondo.observe.glance import EngineGlance, Glance
from rondo.observe.lane import Lane
from rondo.observe.live_view import LiveView
from rondo.observe.metrics import Tally
from rondo.observe.recorder import Recorder, forget_from
from rondo.observe.spans import SpanBook
from tests.conftest import make_group


@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=30))
def test_a_lanes_seconds_add_up_to_the_wall_clock(steps):
    now = [0]
    lane = Lane("a", clock=lambda: now[0])
    for state, seconds in steps:
        with lane.doing(state):
            now[0] += seconds
        now[0] += 1
    taken = lane.take()
    assert sum(taken.values()) == now[0]
    assert sum(lane.take().values()) == 0


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), data=st.data())
def test_a_mean_does_not_depend_on_how_it_was_added_up(values, data):
    whole, pieces = Tally(), Tally()
    whole.mean("x", sum(values), len(values))
    cut = data.draw(st.integers(0, len(values)))
    for piece in (values[:cut], values[cut:]):
        pieces.mean("x", sum(piece), len(piece))
    assert math.isclose(whole.read()["x"], pieces.read()["x"], rel_tol=1e-9, abs_tol=1e-9)


def recorder(folder, shown):
    return Recorder(
        folder=folder,
        lane=Lane(),
        spans=SpanBook(folder),
        trainer_tally=Tally,
        counters=lambda: {"request_retries": 0},
        decode=lambda ids: " ".join(map(str, ids)),
        show=shown.append,
    )


def test_a_period_becomes_one_line_of_metrics_and_some_samples(tmp_path):
    shown = []
    book = recorder(tmp_path, shown)
    for index in range(2):
        group = make_group(index=index)
        book.saw(
            dataclasses.replace(group, rewards=(float(index), 1.0), reward_parts={"f": (float(index), float("nan"))}),
            True,
        )
    book.evaluated(1, 0.5)
    book.finish(0)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == json.loads(json.dumps(shown[0]))
    assert (line["reward_mean"], line["reward/f"], line["length_mean"]) == (0.75, 0.5, 1.5)
    assert line["reward_std"] == math.sqrt(0.1875)
    assert line["eval_reward"] == 0.5
    samples = [json.loads(sample) for sample in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(sample["completion"], sample["reward"]) for sample in samples] == [("4 5", 0.0), ("6", 1.0)]


def test_a_resumed_run_forgets_the_lines_it_will_write_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"period": n}) + "\n" for n in range(4)))
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps({"version": n}) + "\n" for n in (0, 2, 4)))
    forget_from(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"period": 0}', '{"period": 1}']
    assert (tmp_path / "evals.jsonl").read_text().splitlines() == ['{"version": 0}']


def test_the_console_says_what_bounds_each_lane(capsys, tmp_path):
    console = Console(total=1)
    console.show({"version": 0, "eval_reward": 0.25})
    console.show(
        {
            "period": 0, "reward_mean": 0.5, "length_mean": 3.0, "seconds": 2.0, "eval_reward": 0.75,
            "trainer_seconds": {"training": 1.5, "publishing": 0.5},
            "engine_seconds": [{"generating": 1.0, "idle": 1.0}],
        }
    )  # fmt: skip
    console.end(tmp_path)
    said = capsys.readouterr().out
    assert "held-out reward 0.250 -> 0.750" in said
    assert "training 75%, publishing 25%" in said
    assert "generating 50%, idle 50%" in said


def glance(**changes):
    values = {
        "period": 3, "doing": "waiting for groups", "seconds": {"training": 3.0, "waiting for groups": 1.0},
        "groups": 12, "total": 64, "tokens": 4000,
        "engines": [EngineGlance(name="engine 0", load=60, slots=64, version=3, seconds={"generating": 2, "idle": 2})],
    }  # fmt: skip
    return Glance(**(values | changes))


def test_the_live_view_shows_both_lanes_rewards_engines_and_the_last_warning():
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=110, color_system=None)
    view = LiveView(terminal, glance, start=0, total=10, name="mine")
    for period in range(3):
        view.show({"period": period, "reward_mean": period / 2, "length_mean": 7.0, "logp_gap_mean": 2e-7})
    view.show({"version": 3, "eval_reward": 0.625})
    view.warn("engine http://x failed")
    terminal.print(view.render())
    lines = terminal.file.getvalue().splitlines()
    assert [line.split("  ")[0].strip() for line in lines[:5]] == ["mine", "trainer", "engine 0", "groups", "reward"]
    assert "period 4/10" in lines[0]
    assert "left" in lines[0]
    assert "█" * 24 + "░" * 8 in lines[1]
    assert "75% busy  waiting for groups" in lines[1]
    assert "50% busy  60/64 samples  version 3" in lines[2]
    assert "12/64  1,000 tokens/s" in lines[3]
    assert "▁▅█" in lines[4]
    assert "1.000  held-out 0.625  length 7.0  gap 2e-07" in lines[4]
    assert lines[5].startswith("! engine http://x failed (")


def test_a_terminal_gets_the_live_view_and_a_log_gets_lines(tmp_path):
    program = """
import sys
from rich.console import Console as Terminal

from rondo.observe.console import Console
from rondo.observe.glance import EngineGlance, Glance
from rondo.observe.live_view import LiveView
from rondo.observe.glance import Glance
console = Console(total=1)
console.watch(lambda: Glance(period=0, doing="training", seconds={"training": 1.0}, groups=1, total=2, tokens=3))
with console.step("loading"):
    pass
console.begin(0, 10, 10)
console.warn("careful")
line = {"period": 0, "reward_mean": 0.5, "length_mean": 3.0, "seconds": 2.0, "trainer_seconds": {"training": 2.0},
        "engine_seconds": [{"generating": 2.0}]}
console.show(line)
console.end(__import__("pathlib").Path("there"))
"""

    def said(**environment: str) -> str:
        ours, theirs = pty.openpty()
        kept = {name: value for name, value in os.environ.items() if name != "CI"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, stdout=theirs, check=True, env=kept | {"TERM": "xterm", "COLUMNS": "120"} | environment)
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
            while piece := os.read(ours, 65536):
                text += piece
        os.close(ours)
        return text.decode()

    live, log = said(), said(CI="true")
    assert "\x1b[" in live
    assert "period    1/1" not in live
    assert "\x1b[" not in log
    assert "period    1/1  reward  0.500" in log
    for text in (live, log):
        assert "warning: careful" in text
        assert "look at it: rondo report there" in text
