"""A TCP proxy that misbehaves: it stands between the pool and an engine, and cuts, delays, truncates or garbles.

`faults` is consulted once per answer of the engine, with the answer's number; None lets it pass. The proxy runs in a
thread of its own, so that a test may block.

    cut         the connection is closed instead of answering
    hang        the answer is never passed on
    delay       it is passed on after `seconds`
    truncate    it is cut after `bytes` bytes
    garble      a few bytes in the middle of it are replaced
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class Fault:
    kind: str
    seconds: float = 0.0
    bytes: int = 0


class Proxy:
    def __init__(self, target: str, *, faults: Callable[[int], Fault | None] = lambda number: None) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", int(parts.port or 80))
        self.faults = faults  # may be replaced at any time
        self.done: list[str] = []  # what was done to whom, in order
        self.answers = 0
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def retarget(self, target: str) -> None:
        """The engine behind this address is another one from here on."""
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", int(parts.port or 80))

    def cut_all(self) -> None:
        """Every open connection, now."""
        self._loop.call_soon_threadsafe(self._cut_all)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self._port))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        self._cut_all()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    def _cut_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            answers, engine = await asyncio.open_connection(*self._target)
        except OSError:  # nobody is there: the client sees a closed connection
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(engine)
        asked = asyncio.Event()
        try:
            pumps = {
                asyncio.ensure_future(_ask(reader, engine, asked)),
                asyncio.ensure_future(self._answer(answers, writer, asked)),
            }
            _, left = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in left:
                pump.cancel()
        finally:
            for one in (writer, engine):
                self._writers.discard(one)
                one.transport.abort()

    def _next(self) -> Fault | None:
        fault = self.faults(self.answers)
        self.answers += 1
        if fault is not None:
            self.done.append(fault.kind)
        return fault

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event) -> None:
        fault: Fault | None = None
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if asked.is_set():  # the first portion of an answer
                    asked.clear()
                    fault, passed = self._next(), 0
                if fault is not None:
                    if fault.kind == "cut":
                        return
                    if fault.kind == "hang":
                        await asyncio.sleep(3600)
                    data = await _harmed(data, fault, passed)
                writer.write(data)
                await writer.drain()
                passed += len(data)
                if fault is not None and fault.kind == "truncate" and passed >= fault.bytes:
                    return


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            asked.set()
            writer.write(data)
            await writer.drain()


async def _harmed(data: bytes, fault: Fault, passed: int) -> bytes:
    if fault.kind == "delay":
        await asyncio.sleep(fault.seconds)
    if fault.kind == "truncate":
        return data[: max(0, fault.bytes - passed)]
    if fault.kind == "garble" and len(data) > 8:
        middle = len(data) // 2
        return data[:middle] + b"\x00\xff{]" + data[middle + 4 :]
    return data
