"""`rondo report --live`: the page while the run goes on; it asks for news every two seconds.

On loopback unless told otherwise: whoever reaches it can read the run's samples and config.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from pathlib import Path

from aiohttp import web

from rondo.errors import AddressError
from rondo.report.data import gather
from rondo.report.page import finite, render

WATCHED = ("metrics.jsonl", "spans.jsonl", "samples.jsonl", "evals.jsonl", "certificate.jsonl", "certificate.json")


class Live:
    """One run as a small site: `/` is the page, `/data.json` what it shows, made anew when a file has grown."""

    def __init__(self, run: Path, against: Path | None) -> None:
        self._run = run
        self._against = against
        self._stamp = ""
        self._body = b""

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes([web.get("/", self.page), web.get("/data.json", self.data)])
        return application

    async def page(self, _: web.Request) -> web.Response:
        text = await asyncio.to_thread(lambda: render(gather(self._run, against=self._against, live=True)))
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def data(self, request: web.Request) -> web.Response:
        stamp = self._now()
        if request.headers.get("If-None-Match") == stamp:
            return web.Response(status=304)
        if stamp != self._stamp:
            self._body = await asyncio.to_thread(self._gathered)
            self._stamp = stamp
        return web.Response(body=self._body, content_type="application/json", headers={"ETag": stamp})

    def _gathered(self) -> bytes:
        data = finite(gather(self._run, against=self._against, live=True))
        return json.dumps(data, separators=(",", ":")).encode()

    def _now(self) -> str:
        """Changes when a file of the run does."""
        paths = [self._run / name for name in WATCHED]
        sizes = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
        return f'"{hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]}"'


def serve(run: Path, *, against: Path | None, host: str, port: int) -> None:
    gather(run, against=against, live=True)  # what is wrong with the folder is said before anything listens
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Live(run, against), host, port))


async def _serve(live: Live, host: str, port: int) -> None:
    runner = web.AppRunner(live.application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --port, or 0 for any free one"
        ) from error
    bound = runner.addresses[0][1]
    sys.stdout.write(f"the run, live, at http://{host}:{bound} (Ctrl-C to end)\n")
    sys.stdout.flush()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
