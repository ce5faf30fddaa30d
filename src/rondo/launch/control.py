"""The control endpoint of a run: engines join and leave it, and people look at it. In rank 0's background loop.

    POST /join   {"url": ENGINE, "token": its own, if it is not the run's}   answers when the engine takes work
    POST /leave  {"url": ENGINE, "now": false}   answers when its requests are finished, or with now: handed to others
    GET /engines, GET /status

Every call must show the run's token. Address and token lie in `control.json` of the run's folder, which its owner alone
can read, for as long as the run goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from rondo.engines.bearer import NEEDED, allowed, write_private
from rondo.engines.seat import Seat
from rondo.errors import AddressError, RondoError
from rondo.launch.fleet import Fleet

LARGEST_BODY = 64 << 10

Handler = Callable[[web.Request], Any]


class Control:
    def __init__(self, fleet: Fleet, *, folder: Path, host: str, port: int, token: str) -> None:
        assert token, "a run has a token"
        self._fleet = fleet
        self._path = folder / "control.json"
        self._host = host
        self._port = port
        self._token = token
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._guard])
        application.add_routes(
            [
                web.get("/engines", self._engines),
                web.get("/status", self._status),
                web.post("/join", self._join),
                web.post("/leave", self._leave),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.2, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise AddressError(
                f"engines.join_host = {self._host}, engines.join_port = {self._port}: cannot listen there "
                f"({error.strerror or error}): name an address of this machine and a free port, or 0 for any"
            ) from error
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._runner.addresses[0][1]}"
        word = {"url": url, "token": self._token, "pid": os.getpid()}
        write_private(self._path, json.dumps(word) + "\n")

    async def close(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.getall("Authorization", [])
        if not allowed(shown[0] if len(shown) == 1 else None, self._token):
            return _refusal(NEEDED, 401)
        try:
            reply: web.StreamResponse = await handler(request)
        except RondoError as error:
            return _refusal(str(error), 400 if isinstance(error, _BadRequest) else 409)
        return reply

    async def _engines(self, _: web.Request) -> web.Response:
        return web.json_response({"engines": [described(seat) for seat in self._fleet.pool.seats]})

    async def _status(self, _: web.Request) -> web.Response:
        pool = self._fleet.pool
        counts = {"ready": len(pool.ready), "engines": len(pool.seats), "waiting": pool.waiting}
        return web.json_response(counts | {"retries": pool.retries, "moved": pool.moved})

    async def _join(self, request: web.Request) -> web.Response:
        body = await _body(request)
        url, token = _engine(body), body.get("token", "")
        if not isinstance(token, str):
            return _refusal("token must be a string", 400)
        seat = await self._fleet.join(url, token)
        return web.json_response(described(seat))

    async def _leave(self, request: web.Request) -> web.Response:
        body = await _body(request)
        url = _engine(body)
        now = body.get("now", False)
        if not isinstance(now, bool):
            return _refusal("now must be true or false", 400)
        await self._fleet.leave(url, now=now)
        return web.json_response({"left": url})


def described(seat: Seat) -> dict[str, Any]:
    """One line of `rondo engines`."""
    return {
        "url": seat.engine.url,
        "name": seat.name,
        "state": "given up" if seat.gone else seat.status.value,
        "seconds": round(time.monotonic() - seat.since, 1),
        "in_flight": seat.in_flight,
        "slots": seat.state.slots,
        "version": seat.state.version,
        "boot": seat.state.boot,
        "tokens": seat.tokens,
        "tokens_per_second": round(seat.rate(), 1),
        "retries": seat.retries,
        "losses": seat.losses,
        "reason": seat.reason,
    }


class _BadRequest(RondoError):  # noqa: N818  (an answer, not a failure)
    pass


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError):
        raise _BadRequest("the body is not JSON") from None
    if not isinstance(body, dict):
        raise _BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def _engine(body: dict[str, Any]) -> str:
    url = body.get("url")
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise _BadRequest("url must be an engine's address: http://HOST:PORT")
    assert isinstance(url, str)
    return url.rstrip("/")


def _refusal(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
