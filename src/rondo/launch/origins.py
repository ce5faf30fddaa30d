"""Where an engine comes from again after it was lost: from the launcher that started it, or from its address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from rondo.engines.keeper import GoneError
from rondo.engines.protocol import Engine
from rondo.engines.seat import Seat
from rondo.launch.restarts import read_word, write_word

POLL_SECONDS = 0.05
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0

Sleep = Callable[[float], Awaitable[None]]


class Announced:
    """Engines that the launcher started: it is told which are lost, and new processes announce themselves."""

    def __init__(self, folder: Path, connect: Callable[[str], Engine], *, sleep: Sleep = asyncio.sleep) -> None:
        self._folder = folder / "engines"
        self._connect = connect
        self._sleep = sleep
        self._boots: dict[str, str] = {}  # of the process that was last connected to, as it announced itself

    def connect(self, name: str) -> Engine | None:
        """The process that announces itself under this name, unless it is the one that is known."""
        word = read_word(self._folder / f"{name}.json")
        if word is None or word["boot"] == self._boots.get(name):
            return None
        self._boots[name] = word["boot"]
        return self._connect(word["url"])

    def lost(self, seat: Seat) -> None:
        self._tell(seat, leave=False)

    def left(self, seat: Seat) -> None:
        self._tell(seat, leave=True)

    async def again(self, seat: Seat, attempt: int) -> Engine:
        while (engine := self.connect(seat.name)) is None:
            if (word := read_word(self._folder / f"{seat.name}.gone")) is not None:
                raise GoneError(word["reason"])
            await self._sleep(POLL_SECONDS)
        return engine

    def _tell(self, seat: Seat, *, leave: bool) -> None:
        word = {"boot": self._boots.get(seat.name), "reason": seat.reason, "leave": leave}
        write_word(self._folder / f"{seat.name}.lost", word)


class Addressed:
    """Engines that others started: they are looked for at their address, less and less often, for ever."""

    def __init__(self, connect: Callable[[str], Engine], *, sleep: Sleep = asyncio.sleep) -> None:
        self._connect = connect
        self._sleep = sleep

    def lost(self, seat: Seat) -> None:
        pass

    def left(self, seat: Seat) -> None:
        pass

    async def again(self, seat: Seat, attempt: int) -> Engine:
        await self._sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 10)))
        return self._connect(seat.engine.url)
