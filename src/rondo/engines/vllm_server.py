"""`rondo serve --backend vllm`: a small parent of a vLLM server.

It starts vLLM as a process group of its own, passes its output on, writes the announcement once calls are answered, and
waits for vLLM's end or a signal. When it ends, however it ends, nothing of vLLM is left: it kills the group, and if it
cannot (SIGKILL), vLLM's workers see that it is gone and do the same (vllm_worker.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rondo.engines.bearer import TOKEN, check_host
from rondo.engines.guest import Guest
from rondo.engines.process import SUPERVISOR, alive, announce, descendants, end_group, identity, printable_host, title
from rondo.engines.vllm import VllmSettings, check_python, command, environment, packages_folder
from rondo.errors import AddressError, DiedError

POLL_SECONDS = 0.2
PARTS = "VLLM::"  # how vLLM titles its processes
GRACE_SECONDS = 5.0  # below the launcher's own, so that it is not killed while it still waits


class VllmServer:
    def __init__(self, line: Sequence[str], variables: Mapping[str, str], *, url: str) -> None:
        self.url = url
        self._told = False
        self._parts: dict[str, str] = {}
        self._tail: deque[str] = deque(maxlen=200)
        self._process = subprocess.Popen(
            line,
            env=os.environ | dict(variables) | {SUPERVISOR: identity(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, name="vllm-output", daemon=True)
        self._reader.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self, ready: Callable[[dict[str, Any]], None], leave: Callable[[], None] = lambda: None) -> None:
        """Until told to stop; raises DiedError when vLLM ends by itself. `ready` gets the workers' state."""
        try:
            if self._wait(self._healthy):
                ready(self._state())
                self._parts = self._name_parts()
                self._wait(lambda: self._lost() != "", leave)
            lost = self._lost()
        finally:
            self.kill()
        if lost:
            raise DiedError(f"vLLM's process {lost} ended")
        if not self._told:
            raise DiedError(f"vLLM ended with {_how(self._process.returncode)}{self._last_words()}")

    def kill(self) -> None:
        """The server and all that it started."""
        end_group(self._process.pid)
        self._process.wait()

    def _wait(self, over: Callable[[], bool], leave: Callable[[], None] = lambda: None) -> bool:
        """True when `over` is; False when told to stop, or when vLLM has ended."""
        while self._process.poll() is None and not self._told:
            if over():
                return True
            time.sleep(POLL_SECONDS)
        if self._told and self._process.poll() is None:
            leave()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        return False

    def _name_parts(self) -> dict[str, str]:
        """vLLM's own processes, by identity: its server can outlive them, and then answers nothing for ever."""
        named = {identity(pid): title(pid) for pid in descendants(self._process.pid)}
        return {name: words for name, words in named.items() if name and words.startswith(PARTS)}

    def _lost(self) -> str:
        """The part that has ended while the server goes on; empty: none."""
        if self._told or self._process.poll() is not None:
            return ""
        return next((words for name, words in self._parts.items() if not alive(name)), "")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except OSError:  # refused, timed out, or a status that is no success
            return False

    def _state(self) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + "/collective_rpc",
            data=json.dumps({"method": "rondo_state"}).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(TOKEN, '')}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                state: dict[str, Any] = json.load(reply)["results"][0]
                return state
        except (OSError, ValueError, KeyError) as error:
            raise DiedError(f"vLLM at {self.url} started without Rondo's worker extension: {error}") from error

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self._tail.append(line.decode(errors="replace").rstrip())

    def _last_words(self) -> str:
        """The first line that names an error and is no warning; what follows a process's death is noise."""
        self._reader.join(timeout=2.0)
        named = [line for line in self._tail if "Error: " in line and "WARNING" not in line]
        return f": {named[0].partition('Error: ')[2][:300]}" if named else ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told = True


def serve_vllm(
    settings: VllmSettings,
    *,
    announce_to: Path | None,
    hold: Callable[[Callable[[], None]], None],
    guest: Guest | None = None,
) -> None:
    """Serve a model with vLLM until told to stop. `hold` is given what to do when our own parent ends."""
    check_host(settings.host, os.environ.get(TOKEN, ""))
    check_python(settings.python)
    url = f"http://{printable_host(settings.host)}:{settings.port}"
    variables = environment(settings, packages_folder(), os.environ)
    server = VllmServer(command(settings), variables, url=url)
    hold(server.kill)

    def ready(state: dict[str, Any]) -> None:
        if announce_to is not None:
            announce(announce_to, url=url, boot=state["boot"])
        sys.stdout.write(f"serving {settings.model} at {url} ({settings.slots} slots)\n")
        sys.stdout.flush()
        if guest is not None:
            guest.arrive(settings.host, settings.port)

    server.run(ready, guest.leave if guest is not None else lambda: None)


def free_port(host: str, port: int) -> int:
    """`port`, or any free one for 0; one that is taken should not cost the loading of a model."""
    try:
        with socket.create_server((host, port)) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): choose another port, or 0 for any free one"
        ) from error


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
