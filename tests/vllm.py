"""A real vLLM for tests: where it is, and how a server of it is started and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

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


def descendants(pid: int) -> list[int]:
    """Ids of all processes that `pid` started, and that those did."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += children.get(todo[0], [])
        found += children.get(todo.pop(0), [])
    return found


def named(pids: list[int], name: str) -> int:
    """The one whose command line starts so."""
    return next(pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_text().startswith(name))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
