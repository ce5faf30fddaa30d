"""Engines that join and leave a run that is going: neither samples nor weights change, and strangers stay outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import EXACT, ended, periods, samples, trained
from tests.integration.harness import started, status_of, wait_for

pytestmark = pytest.mark.heavy

# Rewards that take their time while a file is there: joining takes seconds, these periods do not.
SLOW = """
import time
from pathlib import Path
from rondo.rewards.arithmetic import correct

def slow(**columns):
    if Path({hold!r}).exists():
        time.sleep(0.2)
    return correct(**columns)
"""


@pytest.fixture
def ending():
    """Whoever is started in a test that fails is ended with it."""
    begun: list[subprocess.Popen[Any]] = []

    def begin(process: subprocess.Popen[Any]) -> subprocess.Popen[Any]:
        begun.append(process)
        return process

    yield begin
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()


def cli(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "rondo", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_one_engine_to_three_and_back_changes_neither_samples_nor_weights(tmp_path, calm, arithmetic, ending):
    hold = tmp_path / "hold"
    hold.touch()
    (tmp_path / "slow.py").write_text(SLOW.format(hold=str(hold)))
    run = tmp_path / "run"
    process = ending(started(tmp_path, *EXACT, f'rewards.functions=["{tmp_path}/slow.py:slow"]'))
    wait_for(lambda: (run / "control.json").exists())
    serve = [sys.executable, "-m", "rondo", "serve", "--model", str(arithmetic), "--batch-invariant", "--slots", "16"]
    serve += ["--max-model-len", "32", "--threads", "1"]
    guest = ending(subprocess.Popen([*serve, "--join", str(run)], cwd=tmp_path))
    other = ending(
        subprocess.Popen(
            [*serve, "--announce", str(tmp_path / "other.json")],
            cwd=tmp_path,
            env=os.environ | {"RONDO_TOKEN": "own word"},
        )
    )
    (tmp_path / "own").write_text("own word")
    wait_for(lambda: (tmp_path / "other.json").exists())
    address = json.loads((tmp_path / "other.json").read_text())["url"]
    said = cli("join", "--engine", address, "--run", str(run), "--engine-token-file", str(tmp_path / "own"))
    assert f"{address} joined with version" in said
    wait_for(lambda: cli("engines", str(run)).count(" ready ") == 3)
    reached = periods(tmp_path)
    wait_for(lambda: periods(tmp_path) >= reached + 2)
    table = cli("engines", str(run)).splitlines()
    assert table[0].split()[:3] == ["engine", "state", "load"]
    assert all(int(line.split()[-4]) > 0 for line in table[1:] if line.startswith("http")), table  # tokens per second

    engine = json.loads((run / "engines" / "engine-0.json").read_text())["url"]
    word = json.loads((run / "control.json").read_text())
    assert [status_of(engine, path) for path in ("/health", "/rondo/state", "/v1/models")] == [200, 401, 401]
    assert [status_of(engine, "/rondo/state", token) for token in ("guess", word["token"])] == [401, 200]
    assert status_of(word["url"], "/engines") == 401
    lines = [
        Path(f"/proc/{entry['pid']}/cmdline").read_bytes().decode()
        for entry in json.loads((run / "processes.json").read_text())
    ]
    assert not [line for line in lines if word["token"] in line]

    guest.send_signal(signal.SIGTERM)
    assert guest.wait(timeout=60) == 0
    assert "left" in cli("leave", "--engine", address, "--run", str(run), "--now")
    assert cli("engines", str(run)).count(" ready ") == 1
    hold.unlink()
    outcome = ended(process, tmp_path / "nothing")
    other.terminate()
    other.wait(timeout=20)
    assert outcome.code == 0, outcome.err + outcome.out
    assert trained(run) == trained(calm.folder)
    assert samples(run) == samples(calm.folder)
    engines = {line["engines_ready"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert engines == {1, 2, 3} or engines == {1, 3}
    assert not (run / "control.json").exists()
