"""Whole runs whose engines are killed, stopped and cut off: no sample is lost, no bit differs from a calm run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.proxy import Fault, Proxy
from tests.integration.harness import Outcome, assert_nobody_left, rondo, started, wait_for

pytestmark = pytest.mark.heavy

# Same seeds, same samples, same bits, whichever engine answers and whenever.
EXACT = (
    "schedule.order=prompt",
    "engines.batch_invariant=true",
    "engines.max_model_len=32",
    "engines.threads=1",
    "trainer.threads=1",
    "schedule.periods=12",
    "rollout.prompts_per_period=16",
    "engines.health_every=0.2",
    "engines.health_seconds=2",
)


def trained(folder: Path) -> list[tuple[object, ...]]:
    """What a run came to, period by period, in bits."""
    lines = [json.loads(line) for line in (folder / "certificate.jsonl").read_text().splitlines()]
    return [(line["period"], line["gradient_hashes"], line["weights_hash"], line["samples"]) for line in lines]


def samples(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()


def periods(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def pids(folder: Path) -> dict[str, int]:
    return {entry["role"]: entry["pid"] for entry in json.loads((folder / "run" / "processes.json").read_text())}


def ended(process: subprocess.Popen[str], folder: Path) -> Outcome:
    out, err = process.communicate(timeout=300)
    assert_nobody_left(folder)
    return Outcome(code=process.returncode, out=out, err=err, folder=folder / "run")


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Outcome:
    outcome = rondo(tmp_path_factory.mktemp("calm"), *EXACT)
    assert outcome.code == 0, outcome.err
    return outcome


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


def test_an_engine_given_up_ends_the_run_with_its_last_words(tmp_path):
    process = started(tmp_path, *EXACT, "engines.max_restarts=0", "schedule.periods=1000")
    wait_for(lambda: periods(tmp_path) >= 1)
    os.kill(pids(tmp_path)["engine-0"], signal.SIGKILL)
    outcome = ended(process, tmp_path)
    assert outcome.code == 1
    assert "no engine is left that could come back: engine-0" in outcome.err
    assert "ended with signal SIGKILL" in outcome.err
    assert len(outcome.err.splitlines()) == 1


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
