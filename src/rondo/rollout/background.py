"""One background thread with one asyncio loop: where everything that waits on the network lives.

The trainer's thread hands it coroutines: `call` waits for the result, `submit` lets the caller do so later, `spawn`
does not (and reports a failure to the given handler, so that no task dies silently). `close` cancels what is left and
joins the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._cpu_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt of the caller must not leave the work running
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Started; the caller asks for the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, on_error: Callable[[BaseException], None]) -> Future[T]:
        def ended(future: Future[T]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                on_error(error)

        spawned = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        spawned.add_done_callback(ended)
        return spawned

    def cpu_seconds(self) -> float:
        """Processor time of the thread since the last call: what HTTP, JSON and dispatch really cost."""

        async def now() -> float:
            return time.thread_time()

        before, self._cpu_seconds = self._cpu_seconds, self.call(now())
        return self._cpu_seconds - before

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
