"""The autoscaling rule, and how its command is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.autoscale import Autoscaler, Rule, Shares, decide, shares_of

RULE = Rule(wait=0.3, idle=0.5, periods=2)


def line(wait: float, idle: float, engines: int = 2) -> dict[str, Any]:
    return {
        "trainer_seconds": {"training": 1 - wait, "waiting for groups": wait},
        "engine_seconds": [{"idle tail": idle, "generating": 1 - idle, "away": 7.0}] * engines,
        "engines_ready": engines,
    }


def test_shares_are_those_of_the_time_that_counts():
    shares = shares_of(line(0.25, 0.75))
    assert (shares.wait, shares.idle, shares.engines) == (0.25, 0.75, 2)


@pytest.mark.parametrize(
    ("wait", "idle", "engines", "wanted"),
    [
        (0.4, 0.0, 1, "+1"),
        (0.4, 0.9, 1, "+1"),  # waiting costs more than idling
        (0.1, 0.6, 2, "-1"),
        (0.1, 0.6, 1, ""),  # the last one stays
        (0.2, 0.6, 2, ""),  # it would be missed
        (0.1, 0.4, 2, ""),
    ],
)
def test_more_when_the_trainer_waits_fewer_when_engines_idle(wait, idle, engines, wanted):
    shares = Shares(wait=wait, idle=idle, engines=engines)
    assert decide([shares], RULE) == ""  # too early
    assert decide([shares] * 2, RULE) == wanted


class Scene:
    def __init__(self, folder: Path, command: str) -> None:
        (folder / "logs").mkdir()
        self.log = folder / "logs" / "autoscale.log"
        self.now = 0.0
        self.said: list[str] = []
        self.scaler = Autoscaler(
            command=command, rule=RULE, every=60, folder=folder, say=self.said.append, clock=lambda: self.now
        )

    def waits(self, periods: int) -> None:
        for _ in range(periods):
            self.scaler.saw(line(0.9, 0.0))

    def settle(self) -> str:
        if self.scaler._running is not None:
            self.scaler._running.wait()
        return self.log.read_text()


def test_the_command_is_called_with_the_change_and_not_again_for_a_while(tmp_path):
    scene = Scene(tmp_path, f"{sys.executable} -c 'import os, sys; print(sys.argv[1], os.environ[\"RONDO_RUN\"])'")
    scene.waits(1)
    assert not scene.said
    scene.waits(1)
    assert scene.settle() == f"+1 {tmp_path}\n"
    assert scene.said == ["autoscale +1: the trainer waited 90% of the last 2 periods"]
    scene.waits(5)
    assert len(scene.said) == 1
    scene.now = 61
    scene.waits(1)
    assert scene.settle().count("+1") == 2
    scene.scaler.close()


def test_a_slow_command_holds_up_nothing_and_is_not_called_twice_at_once(tmp_path):
    scene = Scene(tmp_path, "sleep 60")
    for _ in range(4):
        scene.waits(2)
        scene.now += 100
    assert len(scene.said) == 1
    scene.scaler.close()


def test_a_command_that_fails_or_is_not_there_is_said(tmp_path):
    scene = Scene(tmp_path, f"{sys.executable} -c 'import sys; sys.exit(3)'")
    scene.waits(2)
    scene.settle()
    scene.waits(1)
    assert "ended with exit code 3: see" in scene.said[-1]
    (tmp_path / "b").mkdir()
    missing = Scene(tmp_path / "b", "/nowhere/scale")
    missing.waits(2)
    assert missing.said[-1] == "engines.autoscale_command /nowhere/scale cannot be started: No such file or directory"
