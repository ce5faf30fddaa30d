"""Each mistake ends with one sentence that names the thing and the fix, exit code 2, and nobody left behind."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.integration.harness import BASE, Outcome, rondo


def sentence(outcome: Outcome) -> str:
    """The one line that was said."""
    assert outcome.code == 2, (outcome.code, outcome.out, outcome.err)
    lines = outcome.err.splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in outcome.out
    return lines[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.path=./nowhere"], ["model.path = ./nowhere", "no such folder"]),
        (["model.path=."], ["config.json"]),
        (["data.train=missing.jsonl"], ["missing.jsonl", "No such file"]),
        (["data.train=empty.jsonl"], ["empty.jsonl", "no rows"]),
        (["data.train=malformed.jsonl"], ["malformed.jsonl:2", "not valid JSON"]),
        (["data.train=fieldless.jsonl"], ["fieldless.jsonl:2", "no column prompt"]),
        (["data.prompt=question"], ["train.jsonl:1", "no column question"]),
        (["rewards.functions=['no.such:thing']"], ["no.such"]),
        (["rewards.functions=['rewards.py:absent']"], ["rewards.py", "absent"]),
        (["rollout.grup_size=4"], ["rollout.grup_size", "did you mean group_size?"]),
        (["rollout.group_size=many"], ["rollout.group_size", "many"]),
        (["rollout.top_p=0.9"], ["rollout.top_p", "rollout.off_policy_sampling"]),
        (["schedule.updates_per_period=9"], ["schedule.updates_per_period", "rollout.prompts_per_period"]),
        (["trainer.cpus=[4095]"], ["core 4095"]),
    ],
)
def test_what_can_be_known_before_the_start_is_said_before_the_start(tmp_path, settings, words):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "malformed.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": \n')
    (tmp_path / "fieldless.jsonl").write_text('{"prompt": "1+1="}\n{"question": "2"}\n')
    (tmp_path / "rewards.py").write_text("")
    said = sentence(rondo(tmp_path, *settings))
    for word in words:
        assert word in said


def test_a_missing_config_is_named(tmp_path):
    command = [sys.executable, "-m", "rondo", "train", str(tmp_path / "absent.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "absent.toml" in done.stderr


REWARDS = """
import time

def raises(prompts, completions, **columns):
    raise KeyError("no such thing")

def hangs(prompts, completions, **columns):
    time.sleep(3600)

def nan(prompts, completions, **columns):
    return [float("nan")] * len(prompts)

def short(prompts, completions, **columns):
    return [1.0]
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", ["raises", "KeyError"]),
        ("hangs", ["hangs", "1 s"]),
        ("nan", ["nan"]),
        ("short", ["short", "1", "4"]),
    ],
)
def test_a_reward_that_misbehaves_stops_the_run_and_leaves_evidence(tmp_path, function, words):
    (tmp_path / "rewards.py").write_text(REWARDS)
    outcome = rondo(tmp_path, f"rewards.functions=['rewards.py:{function}']", "rewards.seconds=1.0")
    said = sentence(outcome)
    for word in words:
        assert word in said
    evidence = next((outcome.folder / "evidence").iterdir())
    assert str(evidence) in said
    assert "prompt" in evidence.read_text()


def test_a_prompt_longer_than_the_context_is_named(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+" * 400 + "1=", "answer": "1"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = sentence(rondo(tmp_path, "data.train=long.jsonl", "data.eval=", "data.shuffle=false"))
    assert "1+1+1+" in said
    assert "rollout.max_new_tokens" in said


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = sentence(rondo(tmp_path, f"engines.base_port={port}"))
    assert str(port) in said


def test_a_url_without_an_engine_is_named(tmp_path):
    said = sentence(rondo(tmp_path, "engines.urls=['http://127.0.0.1:9']"))
    assert "http://127.0.0.1:9" in said


def test_an_engine_that_serves_another_model_is_named(tmp_path, engine, arithmetic):
    wider = Qwen2Config.from_pretrained(arithmetic, hidden_size=256)
    Qwen2ForCausalLM(wider).save_pretrained(tmp_path / "wider")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(arithmetic / name, tmp_path / "wider" / name)
    said = sentence(rondo(tmp_path, f"engines.urls=['{engine}']", f"model.path={tmp_path / 'wider'}"))
    assert f"engine {engine} serves another model: its hidden_size is 128, but model.path" in said


def test_resuming_what_never_ran_is_refused(tmp_path):
    assert "no run to resume" in sentence(rondo(tmp_path, options=("--resume",)))


def test_a_dry_run_prints_the_resolved_config_and_starts_nothing(tmp_path):
    outcome = rondo(tmp_path, "rollout.group_size=16", options=("--dry-run",))
    assert outcome.code == 0, outcome.err
    assert '"group_size": 16' in outcome.out
    assert "model, data and rewards were found" in outcome.out
    assert not outcome.folder.exists()


def test_a_dry_run_finds_the_prompt_that_is_too_long(tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1" * 500, "answer": "2"}) + "\n")
    outcome = rondo(tmp_path, "data.train=long.jsonl", options=("--dry-run",))
    assert outcome.code == 2
    assert "rollout.max_new_tokens" in outcome.err


def test_the_base_config_itself_is_good(tmp_path):
    assert rondo(tmp_path, options=("--dry-run",), config=BASE).code == 0
