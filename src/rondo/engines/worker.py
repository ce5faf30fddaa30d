"""The engine's thread: the only one that touches the model.

It consumes commands from a thread-safe queue and produces results as futures of the event loop. It waits in
`queue.get` when the engine has nothing to do; whoever puts a command wakes it. Handlers of the event loop
wait on futures; the thread wakes them with `call_soon_threadsafe`. When a handler is cancelled (its client is
gone) it puts an abort. When the thread dies, every waiting future gets a DiedError, `died` is set and new
commands are refused; when it is told to stop, it ends after the step under way.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rondo.engines.dialect import Refusal
from rondo.engines.embedded import EmbeddedEngine, Request, Result
from rondo.engines.updates import BROKEN_VERSION, WeightUpdates
from rondo.errors import DiedError, EngineError

T = TypeVar("T")
Outcome = tuple["asyncio.Future[Any]", Any]


@dataclass(kw_only=True, slots=True, eq=False)
class _Pending:
    """A request on its way: the thread fills in the ticket before any abort can follow in the queue."""

    future: asyncio.Future[Result]
    ticket: int = -1


class EngineWorker:
    def __init__(self, engine: EmbeddedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.updates = WeightUpdates(engine)
        self.died: asyncio.Future[str] = loop.create_future()  # the reason
        self._loop = loop
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pending: dict[int, _Pending] = {}  # the thread's own
        self._pausing: list[asyncio.Future[bool]] = []  # the thread's own
        self._futures: set[asyncio.Future[Any]] = set()  # the loop's own: what a death must wake
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rondo-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join(seconds)

    async def generate(self, request: Request) -> Result:
        pending = _Pending(future=self._future())
        self._commands.put(lambda: self._submit(pending, request))
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._commands.put(lambda: self._abort(pending))
            raise

    async def pause(self, *, abort: bool) -> bool:
        """True when nothing runs any more; False if it was resumed before."""
        future: asyncio.Future[bool] = self._future()
        self._commands.put(lambda: self._pause(future, abort))
        return await future

    async def call(self, action: Callable[[], T]) -> T:
        """Run something in the engine's thread, between two steps. Its RondoErrors come back."""
        future: asyncio.Future[T] = self._future()
        self._commands.put(lambda: self._call(future, action))
        return await future

    def resume(self) -> None:
        """In the engine's thread, through `call`."""
        if self.updates.open or self.engine.version == BROKEN_VERSION:
            raise EngineError("a weight update is open or has failed: finish a good one before /resume")
        self.engine.paused = False
        self._wake([(future, False) for future in self._pausing])
        self._pausing.clear()

    def refuse_waiting(self) -> None:
        """In the engine's thread: whoever waits for weights that did not come is told so."""
        if self.engine.version != BROKEN_VERSION:
            return
        waiting = list(self._pending.values())
        for pending in waiting:
            self.engine.abort(pending.ticket)
        self._pending.clear()
        self._wake([(pending.future, _broken()) for pending in waiting])

    def _future(self) -> asyncio.Future[Any]:
        if self.died.done():
            raise DiedError(self.died.result())
        future: asyncio.Future[Any] = self._loop.create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if not self.engine.idle:
                    self._deliver(self.engine.step())
                if self._pausing and not self.engine.running:
                    self._wake([(future, True) for future in self._pausing])
                    self._pausing.clear()
        except BaseException as error:  # the supervised edge: a dead thread must not look like a slow one
            reason = f"the engine's thread died: {type(error).__name__}: {error}"
            traceback.print_exc()
            self._loop.call_soon_threadsafe(self._die, reason)

    def _obey(self) -> None:
        """All commands that are there; if nothing else is to do, wait for one."""
        if self.engine.idle and not self._pausing:
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _submit(self, pending: _Pending, request: Request) -> None:
        if self.engine.version == BROKEN_VERSION and not self.updates.open:
            self._wake([(pending.future, _broken())])
            return
        pending.ticket = self.engine.submit(request)
        self._pending[pending.ticket] = pending

    def _abort(self, pending: _Pending) -> None:
        self.engine.abort(pending.ticket)
        self._pending.pop(pending.ticket, None)

    def _pause(self, future: asyncio.Future[bool], abort: bool) -> None:
        self.engine.paused = True
        if abort:
            self._deliver(self.engine.abort_running())
        self._pausing.append(future)

    def _call(self, future: asyncio.Future[T], action: Callable[[], T]) -> None:
        try:
            outcome: Any = action()
        except Exception as error:  # belongs to the caller, not to this thread
            outcome = error
        self._wake([(future, outcome)])

    def _deliver(self, results: list[Result]) -> None:
        if results:
            self._wake([(self._pending.pop(result.ticket).future, result) for result in results])

    def _wake(self, outcomes: list[Outcome]) -> None:
        self._loop.call_soon_threadsafe(_resolve, outcomes)

    # And this in the event loop.

    def _die(self, reason: str) -> None:
        self.died.set_result(reason)
        _resolve([(future, DiedError(reason)) for future in list(self._futures)])


def _resolve(outcomes: list[Outcome]) -> None:
    for future, outcome in outcomes:
        if future.done():
            continue  # cancelled meanwhile
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _broken() -> Refusal:
    return Refusal("the last weight update failed: no answers until a good one is finished", status=503)
