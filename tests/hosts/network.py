"""Machines for tests: network namespaces on one bridge, each with an address, a loopback and memory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rondo.engines.bearer import TOKEN


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine."""

    space: str  # its network namespace; empty: this very machine, and then nothing is private
    address: str

    def start(
        self,
        *command: str,
        log: IO[str],
        home: Path,
        private: tuple[Path, ...] = (),
        own_memory: bool = True,
        token: str = "",
    ) -> subprocess.Popen[str]:
        """A process there, which finds the `private` folders (and shared memory) empty, and shares them with no other
        but its children."""
        if self.space:
            empty = (*private, Path("/dev/shm")) if own_memory else private
            mounts = "".join(f"mount -t tmpfs none '{path}' && " for path in empty)
            command = ("ip", "netns", "exec", self.space, "sh", "-c", f'{mounts} exec "$@"', "sh", *command)
        environment = os.environ | ({TOKEN: token} if token else {})
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, cwd=home, env=environment)


class Network:
    def __init__(self, count: int) -> None:
        self._hub = f"rondo-{os.getpid()}-hub"
        self.hosts = [
            Host(space=f"rondo-{os.getpid()}-{number}", address=f"10.77.0.{number}") for number in range(1, count + 1)
        ]

    def open(self) -> None:
        """Raises CalledProcessError where this is not permitted."""
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts, start=1):
            _ip("netns", "add", host.space)
            _ip("-n", self._hub, "link", "add", f"port{number}", "type", "veth", "peer", "eth0", "netns", host.space)
            _ip("-n", self._hub, "link", "set", f"port{number}", "master", "bridge", "up")
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.space, "link", "set", "eth0", "up")
            _ip("-n", host.space, "link", "set", "lo", "up")

    def close(self) -> None:
        if shutil.which("ip") is None:
            return
        for space in (self._hub, *(host.space for host in self.hosts)):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True, text=True)
