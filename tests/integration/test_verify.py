"""`rondo verify` and `rondo replay` as a person runs them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.harness import BASE, assert_nobody_left, rondo


def cli(folder, *arguments):
    command = [sys.executable, "-m", "rondo", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert_nobody_left(folder)
    return done


@pytest.mark.heavy
def test_a_config_is_trained_and_proved_in_every_mode(tmp_path):
    (tmp_path / "run.toml").write_text(BASE)
    done = cli(tmp_path, "verify", "run.toml", "--periods", 2, "--mode", "all", "--run-dir", "proof")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Holds: weights") == 3
    for mode in ("arrival", "prompt", "exact"):
        certificate = json.loads((tmp_path / "proof" / mode / "certificate.json").read_text())
        assert certificate["verdict"] == "holds"
        assert certificate["mode"]["periods"] == 2
        checked = {(line["what"], line["name"]) for line in certificate["lines"]}
        assert {("gradient", "2 ranks"), ("gradient", "recorded arrival"), ("weights", "after the period")} <= checked


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="sharded", marks=pytest.mark.long),
        pytest.param(("trainer.accumulation=exact",), id="exact"),
    ],
)
def test_a_run_of_two_engines_and_two_ranks_is_proved_and_replayed(tmp_path, settings):
    outcome = rondo(
        tmp_path,
        "trainer.ranks=2",
        "engines.count=2",
        "trainer.micro_tokens=64",
        "trainer.checkpoint_every=2",
        *settings,
    )
    assert outcome.code == 0, outcome.err
    done = cli(tmp_path, "verify", "run", "--ranks", "1,2,3")
    assert done.returncode == 0, done.stdout + done.stderr
    certificate = json.loads((outcome.folder / "certificate.json").read_text())
    assert (certificate["mode"]["ranks"], certificate["mode"]["engines"]) == (2, 2)
    counts = {line["name"]: line for line in certificate["lines"]}
    assert counts["1 ranks"]["promise"] == counts["3 ranks"]["promise"] == ("bits" if settings else "bound")
    # From the checkpoint before period 2, not from the base model.
    replayed = cli(tmp_path, "replay", "run", "--period", 2, "--set", "trainer.attention=separate")
    assert replayed.returncode == 0, replayed.stderr
    assert "as recorded" in replayed.stdout
    assert "micro-steps in" in replayed.stdout
    assert not list(outcome.folder.glob(".replay-*")) + list(outcome.folder.glob(".verify-*"))


def test_what_cannot_be_verified_is_said_in_a_sentence(tmp_path):
    empty = cli(tmp_path, "verify", str(tmp_path))
    assert (empty.returncode, empty.stderr.count("\n")) == (2, 1)
    assert "holds no run" in empty.stderr
    (tmp_path / "run.toml").write_text(BASE)
    assert "--mode odd is unknown" in cli(tmp_path, "verify", "run.toml", "--mode", "odd").stderr
    assert "--ranks 1;2: write numbers" in cli(tmp_path, "verify", "run.toml", "--ranks", "1;2").stderr
