"""Runs with several trainer ranks: the same bits where they are promised, and what happens when a rank dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from rondo.config import parse_config
from rondo.observe.spans import read_periods
from tests.integration.harness import rondo, started, survivors, wait_for

pytestmark = pytest.mark.heavy

INVARIANT = ("engines.batch_invariant=true", "engines.max_model_len=32", "engines.threads=1")


ALGORITHMS = {
    "filtered": ("algorithm.name=dapo",),
    "KL in the reward, filtered": (
        "algorithm.name=rloo", "algorithm.kl.coefficient=0.05", "algorithm.filter=nonzero-spread",
    ),
    "adapters": ("trainer.lora.rank=4", "trainer.learning_rate=1e-3", "algorithm.kl.coefficient=0.05"),
}  # fmt: skip


@pytest.mark.parametrize(
    "algorithm",
    ["filtered", *(pytest.param(name, marks=pytest.mark.long) for name in ALGORITHMS if name != "filtered")],
)
def test_in_exact_mode_one_rank_and_two_train_the_same_model(tmp_path, algorithm):
    """Live, in order of arrival: the samples are the same by their seeds, the weights by exact sums."""
    models = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        settings = (*INVARIANT, "trainer.accumulation=exact", f"trainer.ranks={ranks}", "schedule.periods=2")
        outcome = rondo(folder, *settings, *ALGORITHMS[algorithm])
        assert outcome.code == 0, outcome.err
        models.append(load_file(outcome.folder / "model" / "model.safetensors"))
    assert models[0].keys() == models[1].keys()
    assert not any("lora" in name for name in models[0])  # what is left is one plain model
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    processes = json.loads((outcome.folder / "processes.json").read_text())
    assert [process["role"] for process in processes] == ["launcher", "trainer-0", "trainer-1", "engine-0"]
    seen = list(read_periods(outcome.folder))[-1]
    assert {"trainer", "trainer-1"} <= seen.lanes.keys()  # from the second step on: their clocks have met
    assert {span.kind for span in seen.lanes["trainer-1"]} >= {"training", "stepping"}
    for line in outcome.lines("metrics.jsonl"):
        assert line["groups_trained"] + line["groups_skipped"] == 8
        assert line["logp_gap_max"] < 1e-4  # what the engine got is what was trained


@pytest.mark.parametrize(("reduce", "dtype"), [("step", "float32"), ("micro-step", "bfloat16")])
def test_two_ranks_train_in_bfloat16_with_everything_frozen_on_the_host(tmp_path, reduce, dtype):
    narrow = ("trainer.dtype=bfloat16", f"model.dtype={dtype}", "trainer.ranks=2", "trainer.offload=true")
    several = ("schedule.updates_per_period=2", "algorithm.kl.coefficient=0.01", f"trainer.reduce={reduce}")
    outcome = rondo(tmp_path, *narrow, *several)
    assert outcome.code == 0, outcome.err
    for line in outcome.lines("metrics.jsonl"):
        assert 1e-4 < line["logp_gap_max"] < 0.3  # bfloat16 against the engine's kernels
    model = load_file(outcome.folder / "model" / "model.safetensors")
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in model.values())


def test_a_rank_that_dies_stops_the_run_at_once_and_one_rank_can_resume_it(tmp_path):
    process = started(tmp_path, "trainer.ranks=2", "schedule.periods=1000", "trainer.checkpoint_every=1")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    pids = {entry["role"]: entry["pid"] for entry in json.loads((tmp_path / "run" / "processes.json").read_text())}
    os.kill(pids["trainer-1"], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    log = tmp_path / "run" / "logs" / "trainer-1.log"
    assert err == f"error: trainer-1 (pid {pids['trainer-1']}) ended with signal SIGKILL; its log: {log}\n"
    assert process.returncode == 1
    assert not survivors(tmp_path)
    newest = max((tmp_path / "run" / "checkpoints").glob("period-*"))
    period = json.loads((newest / "progress.json").read_text())["period"]
    resumed = rondo(tmp_path, "trainer.ranks=1", f"schedule.periods={period + 1}", options=("--resume",))
    assert resumed.code == 0, resumed.err
    assert [line["period"] for line in resumed.lines("metrics.jsonl")] == list(range(period + 1))


def test_ranks_start_under_torchrun_too(tmp_path, tree):
    folder = tmp_path / "run"
    folder.mkdir()
    parse_config(tree(schedule__periods=2)).write(folder / "config.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "-m", "rondo", "rank", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "period    2/2" in done.stdout
    trained = load_file(folder / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in trained.values())
