"""Trainer ranks on two machines under torchrun, engines on a third, and no disk in common."""

from __future__ import annotations

import json
import sys

import pytest

from tests.hosts.conftest import SAME_BITS, assert_same_bits, model_of
from tests.integration.harness import BASE, survivors, wait_for

pytestmark = pytest.mark.heavy

WORD = "shown-by-the-trainer-and-demanded-by-the-engine"


def test_three_machines_without_a_common_disk_train_the_model_of_one_machine(tmp_path, hosts, on_one_machine):
    """Also when they stop and go on: rank 1's part of the checkpoint travels to rank 0's machine and back."""
    first, second, third = hosts
    (tmp_path / "run.toml").write_text(BASE)
    run = tmp_path / "run"
    run.mkdir()
    log = (tmp_path / "log").open("a+")
    serve = [sys.executable, "-m", "rondo", "serve", "--model", model_path(), "--host", third.address, "--port", "8000"]
    invariant = ["--batch-invariant", "--slots", "16", "--max-model-len", "32", "--threads", "1"]
    engine = third.start(*serve, *invariant, private=(run,), log=log, home=tmp_path, token=WORD)
    settings = [*SAME_BITS, f"engines.urls=['http://{third.address}:8000']"]
    try:
        wait_for(lambda: "serving" in (tmp_path / "log").read_text())
        for periods, options in ((4, []), (8, ["--resume"])):
            sets = [word for key in (*settings, f"schedule.periods={periods}") for word in ("--set", key)]
            ranks = []
            for number, host in enumerate((first, second)):
                words = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
                words += ["--master-addr", first.address, "--master-port", "29500", "-m", "rondo", "train", "run.toml"]
                torchrun = [sys.executable, "-m", "torch.distributed.run", *words, "--run-dir", str(run), *sets]
                private = (run,) if number else ()  # rank 0's folder is the run's; the other machine never sees it
                ranks.append(host.start(*torchrun, *options, private=private, log=log, home=tmp_path, token=WORD))
            assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
    finally:
        engine.terminate()
        engine.wait(timeout=20)
        log.close()
    assert_same_bits(on_one_machine, model_of(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["period"] for line in lines] == list(range(8))
    assert all(line["groups_trained"] + line["groups_skipped"] == 8 for line in lines)
    wait_for(lambda: not survivors(tmp_path), seconds=15)


def model_path() -> str:
    from rondo.config import asset_or_path

    return asset_or_path("rondo:arithmetic")
