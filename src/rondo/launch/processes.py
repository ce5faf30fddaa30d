"""Child processes of a run: started with a log and a lifeline, named by role, ended without leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rondo.engines.process import descendants
from rondo.launch.lifeline import VARIABLE

GRACE_SECONDS = 10.0  # between asking a process to end and ending it
MEETING = "RONDO_RENDEZVOUS"  # names the file where trainer ranks find each other; it does not exist yet


class Child:
    def __init__(
        self,
        role: str,
        arguments: Sequence[str],
        *,
        log: Path,
        cpus: Sequence[int],
        environment: dict[str, str],
        stdout: IO[str] | None = None,
    ) -> None:
        self.role = role
        self.log = log
        self.address = ""
        command = [sys.executable, "-m", "rondo", *arguments]
        if cpus:
            command = ["taskset", "--cpu-list", ",".join(map(str, cpus)), *command]
        with log.open("ab") as sink:
            self._log_start = sink.tell()  # a process that is started again goes on in the same log
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout if stdout is not None else sink,
                stderr=sink,
                env=os.environ | {VARIABLE: "1"} | environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which decides
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def ask_to_end(self) -> None:
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic), then kill."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """It, and all that it started: one that hangs may not be able to end its own."""
        others = descendants(self.pid)
        self.end(time.monotonic())
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def obituary(self) -> str:
        """How it ended, in words, with its own last error line."""
        code = self.exit_code
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        said = f": {sentence}" if (sentence := self.last_error()) else ""
        return f"{self.role} (pid {self.pid}) ended with {how}{said}; its log: {self.log}"

    def last_error(self) -> str | None:
        """The sentence of a RondoError that the child printed before it left."""
        said = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        return lines[-1].removeprefix("error: ") if lines else None


def rank_environment(rank: int, size: int, meeting: Path) -> dict[str, str]:
    """Which of how many trainer ranks of this machine a child is, in the words that torchrun uses."""
    words = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), MEETING: str(meeting)}
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        words["GLOO_SOCKET_IFNAME"] = loopback
    return words


def end_all(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_end()
    deadline = time.monotonic() + GRACE_SECONDS
    for child in children:
        child.end(deadline)


def write_processes(path: Path, children: Sequence[Child]) -> None:
    records = [{"role": "launcher", "pid": os.getpid(), "address": ""}]
    records += [{"role": child.role, "pid": child.pid, "address": child.address} for child in children]
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(records, indent=2) + "\n")
    os.replace(aside, path)
