"""A file server for publications: what an engine on another host fetches.

It runs in the background loop of the trainer's rank 0. The path of every file holds a secret word that only engines
are told; only files of the publication folder are served, by their bare name.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from aiohttp import web

from rondo.errors import AddressError


class WeightServer:
    def __init__(self, folder: Path, *, host: str) -> None:
        self._folder = folder
        self._host = host
        self._secret = secrets.token_urlsafe(24)
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application()
        application.add_routes([web.get("/weights/{secret}/{name}", self._serve)])
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
        return {"url": f"http://{host}:{self._port}/weights/{self._secret}/{path.name}"}

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if not secrets.compare_digest(request.match_info["secret"], self._secret) or Path(name).name != name:
            raise web.HTTPNotFound
        path = self._folder / name
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)
