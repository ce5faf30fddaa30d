"""Who may talk to a run's endpoints: whoever shows the run's token. Imports only errors: vLLM's server uses it too.

The token is one word per run, in a file that its owner alone can read (`token` in the run's folder); child processes
get it by environment, never on a command line, where every user of the machine could read it. An endpoint without a
token listens on this machine alone.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from rondo.errors import ConfigError

TOKEN = "RONDO_TOKEN"  # the environment's name for it
OPEN_PATH = "/health"  # says nothing but that something lives
NEEDED = "this endpoint demands the run's token: send it as Authorization: Bearer TOKEN"

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def allowed(header: str | bytes | None, token: str) -> bool:
    """Whether an Authorization header shows the token; takes as long for a near miss as for any other."""
    if not token:
        return True
    shown = header.encode("utf-8", "replace") if isinstance(header, str) else header or b""
    scheme, _, word = shown.partition(b" ")
    return secrets.compare_digest(word.strip(), token.encode()) and scheme.lower() == b"bearer"


def run_token(folder: Path) -> str:
    """The run's token: the environment's, else the one in its folder, else a new one; it lies in the folder after."""
    path = folder / "token"
    token = os.environ.get(TOKEN, "")
    if not token and path.exists():
        return path.read_text().strip()
    token = token or secrets.token_urlsafe(32)
    write_private(path, token + "\n")
    return token


def read_token(path: Path | None) -> str:
    """The token in this file, else the environment's; empty: none."""
    if path is None:
        return os.environ.get(TOKEN, "")
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror or error}") from None
    if not token:
        raise ConfigError(f"--token-file {path} is empty: write a word into it that is hard to guess")
    return token


def write_private(path: Path, text: str) -> None:
    """Aside and renamed; readable by its owner only, from the first moment."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(aside, path)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, token: str, *, option: str = "--host") -> None:
    """What other machines can reach must not be open to them."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"{option} {host} lets other machines in, and there is no token to keep them out: set {TOKEN}, or name a "
            "file with --token-file"
        )


class RequireToken:
    """An ASGI middleware for vLLM's server, by `--middleware`: its own key leaves its control endpoints open."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN, "")

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or self._may(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = json.dumps({"error": {"message": NEEDED, "type": "UnauthorizedError", "code": 401}}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:  # a websocket
            await send({"type": "websocket.close", "code": 1008})

    def _may(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope.get("path") == OPEN_PATH:
            return True
        shown = [value for name, value in scope.get("headers", []) if name.lower() == b"authorization"]
        return allowed(shown[0] if len(shown) == 1 else None, self._token)
