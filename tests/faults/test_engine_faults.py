"""Whole runs whose engines are killed, stopped and cut off: no sample is lost, no bit differs from a calm run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.proxy import Fault, Proxy
from tests.faults.runs import EXACT, ended, periods, pids, samples, trained
from tests.integration.harness import started, wait_for

pytestmark = pytest.mark.heavy


def test_killed_and_stopped_engines_cost_no_sample_and_no_bit(tmp_path, calm):
    """Two engines: one is killed, the other stopped; when the first is back, it is killed again."""
    chance = random.Random()
    process = started(tmp_path, *EXACT, "engines.count=2")
    wait_for(lambda: periods(tmp_path) >= 1)
    first = pids(tmp_path)
    time.sleep(chance.random() * 0.3)  # some moment of a period: prefill, decoding, publication
    os.kill(first["engine-0"], signal.SIGKILL)
    time.sleep(chance.random() * 0.1)
    os.kill(first["engine-1"], signal.SIGSTOP)
    reached = periods(tmp_path)
    announced = tmp_path / "run" / "engines" / "engine-0.json"
    wait_for(lambda: announced.exists() and pids(tmp_path)["engine-0"] != first["engine-0"])
    assert periods(tmp_path) <= reached + 1  # it waited
    time.sleep(chance.random() * 0.5)
    os.kill(pids(tmp_path)["engine-0"], signal.SIGKILL)
    outcome = ended(process, tmp_path)
    assert outcome.code == 0, outcome.err + outcome.out
    assert trained(outcome.folder) == trained(calm.folder)
    assert samples(outcome.folder) == samples(calm.folder)
    assert outcome.out.count("is started again in") == 3
    assert "no sign of life" in outcome.out
    assert "no engine is left: the period waits until one is back" in outcome.out


@contextmanager
def engine_behind(proxy_faults, folder: Path, arithmetic: Path) -> Iterator[Proxy]:
    from tests.conftest import start_engine

    options = ["--model", str(arithmetic), "--batch-invariant", "--slots", "16", "--max-model-len", "32"]
    process, url = start_engine(folder / "outer.json", *options)
    try:
        with Proxy(url, faults=proxy_faults) as proxy:
            yield proxy
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_connections_that_are_cut_delayed_truncated_and_garbled_cost_no_sample_and_no_bit(tmp_path, calm, arithmetic):
    """Two engines behind a proxy each; one answer in twenty is harmed, in every way there is."""
    chance = random.Random(3)
    kinds = ("cut", "delay", "truncate", "garble", "hang")

    def faults(number: int) -> Fault | None:
        if number < 20 or chance.random() > 0.05:
            return None
        return Fault(kind=chance.choice(kinds), seconds=0.2, bytes=chance.randrange(1, 500))

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        engine_behind(faults, tmp_path / "a", arithmetic) as one,
        engine_behind(faults, tmp_path / "b", arithmetic) as other,
    ):
        urls = f"engines.urls={json.dumps([one.url, other.url])}"
        (tmp_path / "run").mkdir()
        process = started(tmp_path / "run", *EXACT, urls, "engines.request_seconds=2", "engines.max_retries=20")
        outcome = ended(process, tmp_path / "run")
        harmed = one.done + other.done
    assert outcome.code == 0, outcome.err + outcome.out
    assert trained(outcome.folder) == trained(calm.folder)
    assert samples(outcome.folder) == samples(calm.folder)
    assert len(harmed) >= 10, harmed
