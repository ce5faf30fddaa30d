"""Kill -9 at random moments, a full disk, an engine that stands still: real processes, real signals."""

from __future__ import annotations

import os
import random
import signal
import subprocess

import pytest

from tests.faults.harness import (
    EXACT,
    assert_clean,
    balanced,
    journalled,
    mounted_tmpfs,
    same,
    start,
    wait_until,
    weights_of,
)
from tests.integration.harness import assert_nobody_left, rondo, wait_for

SETTINGS = (*EXACT, "schedule.periods=8", "trainer.checkpoint_every=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    outcome = rondo(tmp_path_factory.mktemp("whole"), *SETTINGS)
    assert outcome.code == 0, outcome.err
    return weights_of(outcome.folder)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", [1])
def test_whoever_is_killed_whenever_the_run_comes_out_the_same(tmp_path, whole, seed):
    """A reward worker and the launcher, then each of two ranks; the run is resumed, at last without a kill."""
    draw = random.Random(seed)
    folder, settings = tmp_path / "run", (*SETTINGS, "trainer.ranks=2")
    for victim in ("reward-0", "trainer-1", "trainer-0"):
        running = start(tmp_path, *settings, resume=True)
        before = journalled(folder) if (folder / "journal").exists() else 0
        enough = before + draw.randrange(1000, 9000)
        wait_until(lambda: journalled(folder) > enough or running.process.poll() is not None, 90)  # noqa: B023
        assert running.process.poll() is None, running.text
        pid = running.pids()[victim]
        os.kill(pid, signal.SIGKILL)
        if victim == "reward-0":  # costs nobody anything
            running.says("ended its worker process (killed by SIGKILL): the group is scored again")
            os.kill(running.process.pid, signal.SIGKILL)  # the launcher
        running.ended()
        assert_nobody_left(tmp_path)
        if victim.startswith("trainer"):
            assert f"error: {victim} (pid {pid}) ended with signal SIGKILL" in running.text
            assert running.process.returncode == 1
    running = start(tmp_path, *settings, resume=True)
    assert running.ended() == 0, running.text
    assert "journalled periods trained again as recorded" in running.text
    assert same(weights_of(folder), whole)
    told = balanced(folder)
    assert len(told) == 8
    assert sum(line["reused"] for line in told) > 0
    assert_clean(folder)


@pytest.mark.heavy
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path, whole):
    small = tmp_path / "run"
    small.mkdir()
    if why := mounted_tmpfs(small, "1m"):
        pytest.skip(f"NOT TESTED HERE: {why}")
    try:
        running = start(tmp_path, *SETTINGS)
        assert running.ended() == 2, running.text
        errors = [line for line in running.said if line.startswith("error: ")]
        assert len(errors) == 1, running.text
        assert "No space left on device: make room and go on with --resume" in errors[0] or "is full" in errors[0]
        assert_nobody_left(tmp_path)
        subprocess.run(["mount", "-o", "remount,size=200m", str(small)], check=True)
        running = start(tmp_path, *SETTINGS, resume=True)
        assert running.ended() == 0, running.text
        assert same(weights_of(small), whole)
        balanced(small)
        assert_clean(small)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.heavy
def test_a_run_that_stands_still_says_what_it_waits_for_and_goes_on(tmp_path):
    running = start(tmp_path, *EXACT, "schedule.periods=1000", "launch.silence_seconds=2")
    metrics = running.folder / "metrics.jsonl"
    wait_for(metrics.exists)
    pids = running.pids()
    os.kill(pids["engine-0"], signal.SIGSTOP)
    try:
        running.says("nothing has moved for")
        os.kill(running.process.pid, signal.SIGUSR1)
        running.says("asked by SIGUSR1:")
    finally:
        os.kill(pids["engine-0"], signal.SIGCONT)
    periods = len(metrics.read_text().splitlines())
    wait_for(lambda: len(metrics.read_text().splitlines()) > periods + 1)
    running.process.send_signal(signal.SIGINT)
    assert running.ended() == 130, running.text
    engine = next(line for line in running.said if "POST" in line)
    assert "from http://127.0.0.1:" in engine
    assert "nothing has moved for" in (running.folder / "logs" / "trainer-0.log").read_text()
    assert_clean(running.folder)
