"""The engines that a launcher keeps running: who has ended or hangs is started again, after a pause that grows.

Rank 0 knows which engines answer, the launcher has their processes. They speak through files in the run's `engines`
folder, each written aside and renamed:
    NAME.json   by the engine: address, pid and boot; removed by the launcher when that process is over
    NAME.lost   by rank 0: the process with this boot hangs (kill it, start another) or is to leave (do not)
    NAME.gone   by the launcher: it is not started again, and why
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rondo.errors import DiedError, RondoError, UserError

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
GOOD_SECONDS = 600.0  # one that lived so long has shown that it can: its failures no longer count


class Process(Protocol):
    """An engine's process, here or on another machine."""

    address: str

    @property
    def pid(self) -> int: ...
    @property
    def exit_code(self) -> int | None: ...

    def ask_to_end(self) -> None: ...
    def kill(self) -> None: ...
    def obituary(self) -> str: ...
    def last_error(self) -> str | None: ...


P = TypeVar("P", bound=Process)


@dataclass(kw_only=True)
class Post(Generic[P]):
    """One engine's place: the process that holds it, or when the next one is due."""

    name: str
    child: P
    started: float
    announced: bool = False
    ever: bool = False  # it was ready once
    failures: int = 0
    due: float | None = None  # when to start again
    over: bool = False  # it is not started again
    boot: str = field(default="")


class Posts(Generic[P]):
    def __init__(
        self,
        *,
        folder: Path,
        start: Callable[[str], P],
        limit: int,
        patience: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder / "engines"
        self._start = start
        self._limit = limit
        self._patience = patience  # seconds in which a process must be ready
        self._say = say
        self._clock = clock
        self.posts: list[Post[P]] = []

    def open(self, name: str) -> None:
        self.posts.append(Post(name=name, child=self._start(name), started=self._clock()))

    @property
    def children(self) -> list[P]:
        return [post.child for post in self.posts]

    @property
    def loading(self) -> list[str]:
        return [post.name for post in self.posts if not (post.announced or post.over or post.due)]

    def tend(self) -> bool:
        """Look at everyone once; True when a process came, went or announced itself."""
        changed = [self._tend(post) for post in self.posts]  # everyone, whatever the first one said
        return any(changed)

    def _tend(self, post: Post[P]) -> bool:
        if post.over:
            return False
        if post.due is not None:
            if self._clock() < post.due:
                return False
            post.child, post.started, post.due = self._start(post.name), self._clock(), None
            return True
        if post.child.exit_code is not None:
            self._ended(post, post.child.obituary())
            return True
        if (lost := self._read(post, "lost")) is not None:
            return self._told(post, lost)
        if not post.announced and (announced := self._read(post, "json")) is not None:
            post.announced = post.ever = True
            post.child.address, post.boot = announced["url"], announced["boot"]
            return True
        if post.ever and not post.announced and self._clock() - post.started > self._patience:
            post.child.kill()
            self._ended(post, f"{post.name} (pid {post.child.pid}) was killed: not ready after {self._patience:g} s")
            return True
        return False

    def _told(self, post: Post[P], lost: dict[str, Any]) -> bool:
        """Rank 0's word; about a process that is no more, it means nothing."""
        self._path(post, "lost").unlink(missing_ok=True)
        if lost.get("boot") != post.boot:
            return False
        if lost.get("leave"):
            post.child.ask_to_end()
            post.over = True
            self._path(post, "json").unlink(missing_ok=True)
            return True
        post.child.kill()
        self._ended(post, f"{post.name} (pid {post.child.pid}) was killed: {lost.get('reason')}")
        return True

    def _ended(self, post: Post[P], obituary: str) -> None:
        for kind in ("json", "lost"):
            self._path(post, kind).unlink(missing_ok=True)
        if not post.ever:
            raise self._never_ready(post)
        lived, post.announced, post.boot = self._clock() - post.started, False, ""
        post.failures = 1 if lived > GOOD_SECONDS else post.failures + 1
        if post.failures > self._limit:
            post.over = True
            reason = f"{obituary} (engines.max_restarts = {self._limit})"
            self._write(post, "gone", {"reason": reason})
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (post.failures - 1))
        post.due = self._clock() + pause
        self._say(f"{obituary}; it is started again in {pause:g} s ({post.failures} of {self._limit})")

    def _never_ready(self, post: Post[P]) -> RondoError:
        """What cannot even start once will not the next time."""
        if post.child.exit_code == 2 and (sentence := post.child.last_error()):
            return UserError(sentence)
        return DiedError(post.child.obituary())

    def _path(self, post: Post[P], kind: str) -> Path:
        return self._folder / f"{post.name}.{kind}"

    def _read(self, post: Post[P], kind: str) -> dict[str, Any] | None:
        path = self._path(post, kind)
        return read_word(path) if path.exists() else None

    def _write(self, post: Post[P], kind: str, record: dict[str, Any]) -> None:
        write_word(self._path(post, kind), record)


def write_word(path: Path, record: dict[str, Any]) -> None:
    """Aside and renamed: whoever sees the file can read it."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(record) + "\n")
    os.replace(aside, path)


def read_word(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return record
