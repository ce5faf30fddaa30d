"""What a run is waiting for, from whom, for how long: a register of the waits that are on, and one who looks at it.

Whoever waits says so: `with waits.awaiting("a score", "the reward workers")`. A wait that ends is a movement. `Watch`
is a thread that wakes every second: when nothing has moved for `silence_seconds` it says what is awaited, and again
each time that passes; it also says so at once on SIGUSR1. It holds nothing up and is held up by nothing: signals reach
it through a socket, also while the main thread is deep in a library.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class _Wait:
    what: str
    whom: str
    since: float
    more: Callable[[], str]


class Waits:
    """Used from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[int, _Wait] = {}
        self._numbers = count()
        self._workers: list[Callable[[], str]] = []
        self._signs: list[Callable[[], object]] = []
        self._seen: list[object] = []
        self._moved_at = clock()

    @contextmanager
    def awaiting(self, what: str, whom: str, more: Callable[[], str] = str) -> Iterator[None]:
        """`more` is asked for details when the wait is told."""
        number = self.begin(what, whom, more)
        try:
            yield
        finally:
            self.end(number)

    def begin(self, what: str, whom: str, more: Callable[[], str] = str) -> int:
        with self._lock:
            number = next(self._numbers)
            self._waits[number] = _Wait(what=what, whom=whom, since=self._clock(), more=more)
            return number

    def end(self, number: int, *, moved: bool = True) -> None:
        """`moved`: that it ended shows that something goes on."""
        with self._lock:
            self._waits.pop(number, None)
            if moved:
                self._moved_at = self._clock()

    def moved(self) -> None:
        self._moved_at = self._clock()

    def worker(self, doing: Callable[[], str], sign: Callable[[], object]) -> None:
        """One who does not wait but works: what he is at, and a value that changes as he gets on."""
        self._workers.append(doing)
        self._signs.append(sign)

    def still_for(self) -> float:
        """Seconds since a wait ended or a worker got on, as seen by who asks now and then."""
        seen = [sign() for sign in self._signs]
        if seen != self._seen:
            self._seen = seen
            self.moved()
        return self._clock() - self._moved_at

    def lines(self) -> list[str]:
        """One per kind of wait and whom it is for, the oldest first."""
        with self._lock:
            held = list(self._waits.values())
        kinds: dict[tuple[str, str], list[_Wait]] = {}
        for wait in sorted(held, key=lambda wait: wait.since):
            kinds.setdefault((wait.what, wait.whom), []).append(wait)
        now, told = self._clock(), []
        for (what, whom), waits in kinds.items():
            times = f"{len(waits)} x " if len(waits) > 1 else ""
            oldest = "the oldest for" if len(waits) > 1 else "for"
            more = f": {text}" if (text := waits[0].more()) else ""
            told.append(f"waiting for {times}{what} from {whom}, {oldest} {now - waits[0].since:.0f} s{more}")
        return told + [doing() for doing in self._workers]


class Watch:
    def __init__(
        self,
        *,
        waits: Waits,
        silence_seconds: float,
        say: Callable[[str], None],
        signals: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waits = waits
        self._silence_seconds = silence_seconds
        self._say = say
        self._signals = signals
        self._clock = clock
        self._said_at = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> None:
        """Says what is awaited when nothing has moved for so long, and not again before so much more has passed."""
        still = self._waits.still_for()
        if min(still, self._clock() - self._said_at) >= self._silence_seconds:
            self._said_at = self._clock()
            self.tell(f"nothing has moved for {still:.0f} s")

    def tell(self, why: str) -> None:
        lines = self._waits.lines() or ["nothing is awaited"]
        self._say("\n".join([f"{why}:", *(f"  {line}" for line in lines)]))

    def _run(self) -> None:
        while not self._over.is_set():
            if self._asked():
                self.tell("asked by SIGUSR1")
            self.look()

    def _asked(self) -> bool:
        """Waits a while for a signal."""
        if self._signals is None:
            self._over.wait(min(POLL_SECONDS, self._silence_seconds / 4))
            return False
        self._signals.settimeout(min(POLL_SECONDS, self._silence_seconds / 4))
        with suppress(TimeoutError):
            return signal.SIGUSR1 in self._signals.recv(4096)
        return False


def listen() -> socket.socket:
    """Called in the main thread: from now on signals' numbers arrive here too, and SIGUSR1 does nothing else. It may
    have been blocked by whoever started this process, so that none came too early."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    return reader
