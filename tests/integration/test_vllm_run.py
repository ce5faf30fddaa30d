"""Whole runs with a real vLLM on CPU."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from statistics import mean

import pytest

from rondo.engines.process import descendants
from tests.integration.harness import assert_nobody_left, rondo, started, status_of, survivors, wait_for
from tests.vllm import named, require_vllm

pytestmark = pytest.mark.heavy

VLLM = ("engines.backend=vllm", "engines.max_model_len=64", 'engines.arguments=["--enforce-eager"]')


@pytest.fixture(autouse=True)
def _vllm() -> None:
    require_vllm()


def engine_pid(folder: Path) -> int:
    processes = json.loads((folder / "processes.json").read_text())
    return int(next(process["pid"] for process in processes if process["role"] == "engine-0"))


def test_a_run_with_vllm_learns(tmp_path):
    settings = (
        "rollout.prompts_per_period=64",
        "rollout.group_size=8",
        "trainer.learning_rate=3e-4",
        "trainer.warmup_periods=3",
        "schedule.periods=14",
        "engines.slots=64",
        "eval.prompts=64",
    )
    run = rondo(tmp_path, *VLLM, *settings)
    assert run.code == 0, run.err
    assert "engine-0: vLLM loading, 1" in run.out
    lines = run.lines("metrics.jsonl")
    rewards = [float(line["reward_mean"]) for line in lines]
    assert mean(rewards[-4:]) > mean(rewards[:3]) + 0.15, rewards
    assert max(float(line["logp_gap_max"]) for line in lines) < 1e-3
    assert all(line["request_retries"] == 0 for line in lines)
    assert "Starting vLLM server" in (run.folder / "logs" / "engine-0.log").read_text()


def test_a_vllm_killed_in_the_middle_of_a_run_is_started_again_and_the_run_goes_on(tmp_path):
    run = started(tmp_path, *VLLM, "schedule.periods=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def periods() -> int:
        return metrics.read_text().count("\n") if metrics.exists() else 0

    wait_for(lambda: periods() > 2, seconds=180)
    first = engine_pid(tmp_path / "run")
    os.kill(named(descendants(first), "VLLM::EngineCore"), signal.SIGKILL)
    wait_for(lambda: engine_pid(tmp_path / "run") != first, seconds=60)
    reached = periods()
    wait_for(lambda: periods() > reached + 2, seconds=180)
    engine = json.loads((tmp_path / "run" / "engines" / "engine-0.json").read_text())["url"]
    paths = ("/health", "/version", "/collective_rpc", "/rondo/generate", "/v1/completions")
    assert [status_of(engine, path) for path in paths] == [200, 401, 401, 401, 401]
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "it is started again in 1 s (1 of 5)" in out
    assert "no engine is left: the period waits until one is back" in out
    assert "is back, with version" in out
    assert_nobody_left(tmp_path)


def test_a_launcher_killed_while_vllm_loads_leaves_nobody(tmp_path):
    run = started(tmp_path, *VLLM)
    log = tmp_path / "run" / "logs" / "engine-0.log"
    wait_for(lambda: log.exists() and "EngineCore pid" in log.read_text(), seconds=120)
    assert any("VLLM::" in line for line in survivors(tmp_path))
    run.kill()
    run.communicate()
    assert_nobody_left(tmp_path)
