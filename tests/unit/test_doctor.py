"""`rondo doctor`: each thing that can be wrong is found, and comes with how to mend it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.config import ASSETS, read_config
from rondo.doctor import Finding, about, compiler, examine, open_files, parse, vllm


def one(findings) -> Finding:
    (finding,) = findings
    return finding


def test_a_machine_on_which_the_tests_run_is_well():
    findings = list(examine())
    assert not [finding for finding in findings if finding.level == "bad"]
    assert all(finding.mend for finding in findings if finding.level != "ok")


def interpreter(folder: Path, says: str) -> str:
    """Something that answers the question after versions as a Python would."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "mend"),
    [
        ("0.20.0 2.9.0 -", "Rondo needs vLLM 0.24.0 or newer"),
        ("0.24.0 2.10.0 2.11.0", "this vLLM was built for torch 2.11.0"),
        ("", "reinstall it there"),
    ],
)
def test_a_vllm_that_cannot_work_is_named(tmp_path, says, mend):
    finding = one(vllm(interpreter(tmp_path, says)))
    assert finding.level == "bad"
    assert mend in finding.mend


def test_a_vllm_that_goes_with_its_torch_is_well(tmp_path):
    assert one(vllm(interpreter(tmp_path, "0.24.0 2.11.0 2.11.0"))).level == "ok"


def test_an_interpreter_that_is_not_there_is_named():
    finding = one(vllm("/nowhere/python"))
    assert (finding.level, "/nowhere/python" in finding.mend) == ("bad", True)


def test_a_missing_compiler_is_noted(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert one(compiler()).level == "note"


def test_a_low_limit_of_open_files_is_noted():
    program = "from rondo.doctor import open_files; print(next(open_files()).level)"
    low = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # noqa: E731
    said = subprocess.run([sys.executable, "-c", program], preexec_fn=low, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "note"
    assert next(open_files()).what.endswith("files may be open at once")


def test_a_config_is_looked_at_too():
    file = ASSETS / "arithmetic" / "demo.toml"
    assert one(about(read_config(file))).level == "ok"
    finding = one(about(read_config(file, ["data.train=nowhere.jsonl"])))
    assert finding.level == "bad"
    assert "nowhere.jsonl" in finding.mend


def test_versions_are_compared_as_numbers():
    assert parse("2.13.0+cpu") == (2, 13, 0)
    assert parse("2.9.1") < parse("2.11.0rc1")


def test_the_command_says_it_with_its_exit_code(tmp_path):
    line = [sys.executable, "-m", "rondo", "doctor", str(ASSETS / "arithmetic" / "demo.toml")]
    assert subprocess.run(line, capture_output=True, check=False).returncode == 0
    sick = subprocess.run([*line, "--set", "model.path=/nowhere"], capture_output=True, text=True, check=False)
    assert sick.returncode == 1
    assert "BAD   the config cannot be run" in sick.stdout
