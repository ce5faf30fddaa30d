"""A run's engines: the pool, who keeps it alive, and how a connection to an engine is made."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from transformers import AutoConfig

from rondo.config import Config, asset_or_path
from rondo.engines.client import HttpEngine
from rondo.engines.keeper import Keeper, KeeperSettings
from rondo.engines.pool import EnginePool
from rondo.engines.protocol import SHAPE, EngineState
from rondo.engines.seat import Seat
from rondo.errors import AddressError, EngineError, RondoError
from rondo.launch.origins import Addressed, Announced
from rondo.stream.queue import GroupQueue

POLL_SECONDS = 0.05


async def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class Fleet:
    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        session: aiohttp.ClientSession,
        queue: GroupQueue,
        warn: Callable[[str], None],
        token: str = "",
    ) -> None:
        self._config = config
        self._folder = folder
        self._session = session
        self._queue = queue
        self._warn = warn
        self._token = token
        self._tokens: dict[str, str] = {}  # of engines that have one of their own
        self._announced = Announced(folder, self.connect)
        self._addressed = Addressed(self.connect)
        self._shape = _shape(config)
        self.context = 0  # the longest that every engine of the start can serve
        engines = config.engines
        self.pool = EnginePool(
            max_retries=engines.max_retries,
            on_retry=lambda error: warn(f"{error}; the request is sent again"),
            on_lost=lambda seat: self.keeper.lost(seat),
            evidence=lambda record: write_evidence(folder / "evidence", record),
            health_seconds=engines.health_seconds,
        )
        self.keeper = Keeper(
            pool=self.pool,
            settings=KeeperSettings(every=engines.health_every, deadline=engines.health_seconds),
            origin=lambda seat: self._announced if seat.name else self._addressed,
            check=self.check,
            say=warn,
            on_over=self._end,
        )

    def _end(self, error: RondoError) -> None:
        self._queue.fail(error)  # the trainer hears of it where it waits for groups
        self.pool.end(error)  # and so does whoever waits for an answer

    def connect(self, url: str) -> HttpEngine:
        token = self._tokens.get(url, self._token)
        return HttpEngine(url, self._session, seconds=self._config.engines.request_seconds, token=token)

    async def gather(self) -> int:
        """Fill the pool with the engines of the start; returns the longest context that every one can serve."""
        if self._config.engines.urls:
            for url in self._config.engines.urls:
                try:
                    seat = await self.pool.add(self.connect(url))
                except EngineError as error:
                    raise AddressError(f"engines.urls: {url} is no engine that Rondo can drive: {error}") from None
                self._greet(seat)
        else:
            deadline = time.monotonic() + self._config.engines.start_seconds
            names = [f"engine-{number}" for number in range(self._config.engines.count)]
            for name in names:
                self._greet(await self._started(name, names, deadline))
        self.context = min(seat.state.max_model_len for seat in self.pool.seats)
        return self.context

    async def join(self, url: str, token: str = "") -> Seat:
        if token:
            self._tokens[url] = token
        return await self.keeper.join(self.connect(url))

    async def leave(self, url: str, *, now: bool) -> None:
        seat = next((seat for seat in self.pool.seats if seat.engine.url == url), None)
        if seat is None:
            raise AddressError(f"engine {url} takes no part in this run: `rondo engines` lists those that do")
        await self.keeper.leave(seat, now=now)
        self._tokens.pop(url, None)

    def check(self, url: str, state: EngineState) -> None:
        """Whether a newcomer can serve this run."""
        check_shape(url, state.shape, self._shape, self._config.model.path)
        if state.max_model_len < self.context:
            raise AddressError(
                f"engine {url} serves {state.max_model_len} tokens at most, but this run's prompts and responses may "
                f"have {self.context}: start it with a larger --max-model-len"
            )

    def _greet(self, seat: Seat) -> None:
        if seat.state.note:
            self._warn(seat.state.note)
        check_shape(seat.engine.url, seat.state.shape, self._shape, self._config.model.path)

    async def _started(self, name: str, names: list[str], deadline: float) -> Seat:
        """As it announces itself; the launcher watches that it lives, and starts another if it does not."""
        problem = ""
        while True:
            self._queue.raise_if_over()
            engine = self._announced.connect(name)
            if engine is not None:
                try:
                    return await self.pool.add(engine, name=name)
                except EngineError as error:  # it ended just now
                    problem = f" ({error})"
            if time.monotonic() > deadline:
                missing = [one for one in names if one not in {seat.name for seat in self.pool.seats}]
                raise EngineError(
                    f"{', '.join(missing)} not ready after engines.start_seconds = "
                    f"{self._config.engines.start_seconds:g}{problem}: see {self._folder / 'logs'}"
                )
            await asyncio.sleep(POLL_SECONDS)


def _shape(config: Config) -> dict[str, int]:
    text = AutoConfig.from_pretrained(asset_or_path(config.model.path)).get_text_config()
    return {name: getattr(text, name, 0) for name in SHAPE}


def check_shape(url: str, held: Mapping[str, int], wanted: Mapping[str, int], model: str) -> None:
    """An engine that serves another model would refuse the first weights; this says it sooner, and why."""
    for name, value in held.items():
        if value and wanted.get(name) and value != wanted[name]:
            raise AddressError(
                f"engine {url} serves another model: its {name} is {value}, but model.path = {model} has {wanted[name]}"
            )


def write_evidence(folder: Path, record: Mapping[str, Any]) -> Path:
    """What was asked and answered, for a person to look at; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        path = folder / f"request-{number}.json"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(descriptor, "w") as file:
            json.dump(record, file, indent=2, default=str)
        return path
