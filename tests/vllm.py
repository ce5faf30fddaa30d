"""A real vLLM for tests: where it is, and how a server of it is started and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rondo.engines.process import descendants, identity, title
from rondo.engines.vllm import cpu_environment

# Without compilation: it saves half of the start, and nothing here is large.
EAGER = "--argument=--enforce-eager"


def require_vllm() -> None:
    """`make integration` has tried to install it."""
    if not (cpu_environment() / "bin" / "python").exists():
        pytest.skip(f"NO vLLM: {cpu_environment()} is not there; scripts/vllm_environment.py could not build it")


class Server:
    """`rondo serve` in a process of its own; `url` waits until it answers."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._announcement = folder / "engine.json"
        self.log = folder / "engine.log"
        command = [sys.executable, "-m", "rondo", "serve", "--announce", str(self._announcement), "--threads", "1"]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, *options], stdout=sink, stderr=sink, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def url(self) -> str:
        while not self._announcement.exists():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.05)
        return str(json.loads(self._announcement.read_text())["url"])

    def descendants(self) -> list[int]:
        return descendants(self.process.pid)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def named(pids: list[int], name: str) -> int:
    """The one whose command line starts so."""
    return next(pid for pid in pids if title(pid).startswith(name))


def running(pid: int) -> bool:
    return identity(pid) != ""


def shared_memory(pids: list[int]) -> set[str]:
    """Files in shared memory that these processes have mapped."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            name = line.split(maxsplit=5)[-1]
            if name.startswith("/dev/shm/") and Path(name).exists():
                found.add(name)
    return found
