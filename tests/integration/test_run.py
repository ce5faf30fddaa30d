"""A run as a person starts it, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.observe.spans import MOMENTS, read_periods
from rondo.weights.folder import publication_folder
from tests.integration.harness import BASE, assert_nobody_left, rondo, started, wait_for


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return rondo(tmp_path_factory.mktemp("finished"), "engines.count=2", "algorithm.kl.coefficient=0.01")


def test_a_run_ends_well_and_says_what_happened(finished):
    assert finished.code == 0, finished.err
    assert finished.err == ""
    for words in ("period    3/3", "held-out reward", "trainer", "engine 0", "engine 1", "the trained model in"):
        assert words in finished.out


def test_metrics_have_a_line_per_period_whose_times_add_up(finished):
    lines = finished.lines("metrics.jsonl")
    assert [line["period"] for line in lines] == [0, 1, 2]
    wanted = {
        "period", "version", "reward_mean", "reward_std", "seconds", "length_mean", "length_max", "tokens", "loss",
        "gradient_norm", "logp_gap_mean", "logp_gap_max", "kl", "entropy", "trainer_seconds", "engine_seconds",
    }  # fmt: skip
    for line in lines:
        assert wanted <= line.keys()
        assert sum(line["trainer_seconds"].values()) == pytest.approx(line["seconds"])
        assert len(line["engine_seconds"]) == 2
        for lane in line["engine_seconds"]:
            assert sum(lane.values()) == pytest.approx(line["seconds"], rel=0.01, abs=0.01)
    assert [line["version"] for line in finished.lines("evals.jsonl")] == [0, 3]
    sample = finished.lines("samples.jsonl")[0]
    assert {"period", "prompt", "completion", "reward"} <= sample.keys()


def test_spans_cover_the_run_without_a_gap_and_every_group_is_on_its_way_in_order(finished):
    periods = list(read_periods(finished.folder))
    assert [period.period for period in periods] == [0, 1, 2]
    for before, after in pairwise(periods):
        assert before.start + before.seconds == pytest.approx(after.start, abs=1e-3)
    for period in periods:
        for lane in period.lanes.values():
            assert sum(span.seconds for span in lane) == pytest.approx(period.seconds, rel=0.01)
        assert sorted(group["group"] for group in period.groups) == list(range(8))
        for group in period.groups:
            moments = [group[name] for name in MOMENTS]
            assert None not in moments
            assert moments == sorted(moments)
        assert {span.kind for span in period.marks} == {"bucket", "forward", "backward"}
        assert {group["engine"] for group in period.groups} <= set(period.engines)


def test_the_resolved_config_and_the_processes_are_written_down(finished):
    config = json.loads((finished.folder / "config.json").read_text())
    assert config["engines"]["count"] == 2
    assert config["trainer"]["max_grad_norm"] == 1.0
    processes = json.loads((finished.folder / "processes.json").read_text())
    assert [process["role"] for process in processes] == ["launcher", "trainer-0", "engine-0", "engine-1"]
    assert all(process["address"].startswith("http://127.0.0.1:") for process in processes[2:])


def test_the_final_model_loads_with_transformers_and_was_trained(finished, arithmetic):
    model = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    base = AutoModelForCausalLM.from_pretrained(arithmetic)
    assert AutoTokenizer.from_pretrained(finished.folder / "model").eos_token_id is not None
    assert not all(map(torch.equal, model.parameters(), base.parameters()))


def test_a_finished_run_is_not_overwritten(finished):
    again = rondo(finished.folder.parent)
    assert again.code == 2
    assert "already holds a run" in again.err


EXACT = ("schedule.order=prompt", "engines.batch_invariant=true", "engines.max_model_len=32", "engines.threads=1")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "algorithm", [pytest.param("grpo", marks=pytest.mark.long), "dapo"]
)  # DAPO filters: a period's last prompt is not known before
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, algorithm):
    """Interrupted by Ctrl-C in the middle of a period; the samples are the same, so the weights must be."""
    settings = (*EXACT, "schedule.periods=6", f"algorithm.name={algorithm}")
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole = rondo(tmp_path / "whole", *settings)
    process = started(tmp_path / "broken", *settings)
    metrics = tmp_path / "broken" / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "saved; go on with --resume" in err
    assert len(err.splitlines()) == 1
    assert_nobody_left(tmp_path / "broken")
    resumed = rondo(tmp_path / "broken", *settings, options=("--resume",))
    assert resumed.code == 0, resumed.err
    one, other = (load_file(outcome.folder / "model" / "model.safetensors") for outcome in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [line["period"] for line in resumed.lines("metrics.jsonl")] == list(range(6))
    assert whole.lines("evals.jsonl") == resumed.lines("evals.jsonl")


@pytest.mark.heavy
@pytest.mark.parametrize("victim", ["launcher", "engine-0", "trainer-0"])
def test_whoever_is_killed_nobody_is_left_behind(tmp_path, victim):
    process = started(tmp_path, "schedule.periods=1000", "engines.max_restarts=0")
    processes = tmp_path / "run" / "processes.json"
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text())
    pids = {entry["role"]: entry["pid"] for entry in json.loads(processes.read_text())}
    published = publication_folder("", tmp_path / "run")
    assert published.exists()
    os.kill(pids[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert_nobody_left(tmp_path)
    if victim != "launcher":
        assert process.returncode == 1
        assert f"{victim} (pid {pids[victim]}) ended with signal SIGKILL" in err
        assert len(err.splitlines()) == 1
    assert not published.exists()


def test_the_same_from_python(tmp_path, monkeypatch):
    import rondo as package

    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(BASE)
    folder = package.train(package.read_config("run.toml", ["schedule.periods=1", "run.name=mine"]))
    assert folder == tmp_path / "runs" / "mine"
    assert (folder / "model" / "model.safetensors").exists()


def test_a_run_in_bfloat16_works_on_any_cpu(tmp_path):
    """Also on one that dies of SIGILL in a bfloat16 product unless it is told not to try."""
    outcome = rondo(tmp_path, "model.dtype=bfloat16", "schedule.periods=2")
    assert outcome.code == 0, outcome.err
    assert outcome.lines("metrics.jsonl")[-1]["logp_gap_max"] < 0.5
    model = AutoModelForCausalLM.from_pretrained(outcome.folder / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
