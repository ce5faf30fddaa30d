"""A file server for publications: what an engine on another host fetches.

It runs in the background loop of the trainer's rank 0. It demands a token that only engines are told, each with the
address of a file; only files of the publication folder are served, by their bare name.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from aiohttp import web

from rondo.engines.bearer import allowed
from rondo.errors import AddressError


class WeightServer:
    def __init__(self, folder: Path, *, host: str) -> None:
        self._folder = folder
        self._host = host
        self._token = secrets.token_urlsafe(32)
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.add_routes([web.get("/weights/{name}", self._serve)])
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        try:
            await site.start()
        except OSError as error:
            raise AddressError(
                f"weights.host = {self._host}: cannot listen there ({error.strerror or error}): name an address "
                "of this machine that the engines can reach"
            ) from error
        self._port = self._runner.addresses[0][1]

    def url(self, path: Path) -> dict[str, str]:
        assert path.parent == self._folder
        host = f"[{self._host}]" if ":" in self._host else self._host
        return {"url": f"http://{host}:{self._port}/weights/{path.name}", "token": self._token}

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if not allowed(request.headers.get("Authorization"), self._token):
            raise web.HTTPUnauthorized
        if Path(name).name != name:
            raise web.HTTPNotFound
        path = self._folder / name
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)
