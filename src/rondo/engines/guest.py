"""An engine that joins a run by itself: `rondo serve --join RUN`. Standard library only.

A thread asks the run to take the engine in, again and again until it does, and looks every few seconds whether it is
still in: a run that was stopped and resumed finds its guests again. `leave` ends the thread and asks the run to let the
engine go; it returns when nothing is asked of the engine any more.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rondo.engines.bearer import read_token
from rondo.errors import AddressError

LOOK_SECONDS = 5.0
JOIN_SECONDS = 600.0  # the run feeds the engine its weights meanwhile
LEAVE_SECONDS = 600.0  # its requests are finished meanwhile


@dataclass(frozen=True, kw_only=True)
class Control:
    """A run's control endpoint."""

    url: str
    token: str

    def ask(self, path: str, body: dict[str, Any] | None = None, *, seconds: float = 30.0) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            raise AddressError(f"the run at {self.url} refused {path}: {_sentence(error)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AddressError(f"no run answers at {self.url} ({reason}): is it still going?") from None


def find_control(run: str, token_file: Path | None = None) -> Control:
    """The control endpoint of a run that is named by its folder (then on this machine) or by its address."""
    if run.startswith(("http://", "https://")):
        token = read_token(token_file)
        if not token:
            raise AddressError(
                f"the run at {run} demands its token: set RONDO_TOKEN, or name its `token` file with --token-file"
            )
        return Control(url=run.rstrip("/"), token=token)
    path = Path(run) / "control.json"
    try:
        word = json.loads(path.read_text())
        return Control(url=word["url"], token=word["token"])
    except (OSError, ValueError, KeyError):
        raise AddressError(
            f"{path} cannot be read: give the folder of a run that is going, or its control address"
        ) from None


class Guest:
    def __init__(self, run: str, *, token_file: Path | None = None) -> None:
        self._run = run
        self._token_file = token_file
        self._control = find_control(run, token_file)
        self._url = ""
        self._over = threading.Event()
        self._inside = False
        self._thread = threading.Thread(target=self._stay, name="guest", daemon=True)

    @property
    def token(self) -> str:
        """What the engine demands of those who call it: the run's own word."""
        return self._control.token

    def arrive(self, host: str, port: int) -> None:
        """The engine answers from here on."""
        self._url = f"http://{reachable(host, self._control.url)}:{port}"
        self._thread.start()

    def leave(self) -> None:
        self._over.set()
        if self._inside:
            with contextlib.suppress(AddressError):  # the run may be over, which is as good
                self._control.ask("/leave", {"url": self._url}, seconds=LEAVE_SECONDS)

    def _stay(self) -> None:
        said = ""
        while not self._over.is_set():
            try:
                self._control = find_control(self._run, self._token_file)  # a resumed run has another address
                listed = [one["url"] for one in self._control.ask("/engines")["engines"]]
                if self._url not in listed:
                    self._inside = True  # from the moment in which it is asked for
                    self._control.ask("/join", {"url": self._url}, seconds=JOIN_SECONDS)
                    said = _say(f"joined the run at {self._control.url}", said)
            except AddressError as error:
                said = _say(f"not in a run: {error}", said)
            self._over.wait(LOOK_SECONDS)


def reachable(host: str, control: str) -> str:
    """The address under which the run can reach an engine that listens on `host`."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    parts = urlsplit(control)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent: the system names the way
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


def _say(text: str, before: str) -> str:
    if text != before:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    return text


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.code} {error.reason}"
