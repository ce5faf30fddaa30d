"""Keeps one child process of a run, on whatever machine this object lives: the launcher's hand there.

It knows nothing of who calls it. No disk is shared with the caller: the config comes as text; the child's log, what it
printed, its announcement and its last words go back with each `look`. Only trainer rank 0's warden has the run's
folder, on its own machine; the others work in a folder of their own that is gone when they are, however they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rondo.config import Config, parse_config
from rondo.engines.bearer import run_token
from rondo.launch.addresses import LOOPBACK, free_port
from rondo.launch.commands import engine_arguments
from rondo.launch.cpu import environment_for
from rondo.launch.folder import prepare
from rondo.launch.preflight import check
from rondo.launch.processes import GRACE_SECONDS, Child
from rondo.launch.reaper import remove_when_we_end
from rondo.launch.restarts import write_word
from rondo.weights.folder import publication_folder, remove_publication_folder

LARGEST_PIECE = 1 << 20  # of a log, in one answer


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is new about a child since the last look."""

    node: str  # the address of its machine
    pid: int  # 0: there is none
    exit_code: int | None
    log: bytes
    printed: bytes
    announced: str | None  # a living engine's announcement, as it wrote it
    words: dict[str, str]  # what rank 0 has to say about engines (restarts.py), by file name
    error: str | None  # what a trainer rank left in `error.json`
    obituary: str  # when it has ended: how
    sentence: str | None  # when it has ended: the error it told a person


class Warden:
    def __init__(self, role: str, config: str, *, address: str, home: str) -> None:
        """`address`: this machine's, for others; `home`: the folder that relative paths start from, where there is
        one."""
        with contextlib.suppress(OSError):
            os.chdir(home)
        self._role = role
        self._config: Config = parse_config(json.loads(config))
        self._address = address
        self._own = Path(tempfile.mkdtemp(prefix=f"rondo-{role}-"))
        self._run: Path | None = None  # the run's folder: rank 0's
        self._reapers = [remove_when_we_end(self._own)]
        self._child: Child | None = None
        self._sinks: dict[str, IO[bytes]] = {}

    def meeting(self) -> tuple[str, int]:
        """Where trainer ranks can find rank 0, if this is its warden."""
        return self._address, free_port(self._address)

    def prepare(self, *, resume: bool, overwrite: bool) -> tuple[str, str]:
        """Makes the run's folder on this machine: its path, and the run's token. Raises what a person has to mend
        first."""
        check(self._config)
        self._run = prepare(self._config, resume=resume, overwrite=overwrite)
        self._reapers.append(remove_when_we_end(*self._published(self._run)))
        return str(self._run), run_token(self._run)

    def start_rank(self, environment: Mapping[str, str], *, resume: bool) -> None:
        if self._run is None:
            self._config.write(self._own / "config.json")
        folder = self._run or self._own
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a question must not end it before it listens
        self._start(["rank", str(folder), *(["--resume"] if resume else [])], environment)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def start_engine(self, number: int, environment: Mapping[str, str], *, alone: bool) -> None:
        """`alone`: nobody on another machine wants to speak to it."""
        self._announcement.parent.mkdir(exist_ok=True)
        self._announcement.unlink(missing_ok=True)
        threads = self._config.engines.threads or self._config.launch.ray.engine_cpus
        host = LOOPBACK if alone else self._address
        self._start(engine_arguments(self._config, self._own, number, host=host, threads=threads), environment)

    def deliver(self, words: Mapping[str, str | None]) -> None:
        """Files of the folder where rank 0 looks for news of engines; None: away with it."""
        assert self._run is not None
        for name, text in words.items():
            path = self._run / "engines" / name
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write_word(path, json.loads(text))

    def look(self) -> Look:
        child = self._child
        code = None if child is None else child.exit_code
        ended = child if code is not None else None
        error = (self._run or self._own) / "error.json"
        lost = (self._run / "engines").glob("*.lost") if self._run else ()
        return Look(
            node=self._address,
            pid=0 if child is None else child.pid,
            exit_code=code,
            log=self._news("log"),
            printed=self._news("printed"),
            announced=self._announcement.read_text() if code is None and self._announcement.exists() else None,
            words={path.name: path.read_text() for path in lost},
            error=error.read_text() if error.exists() else None,
            obituary=ended.obituary().replace(f"; its log: {ended.log}", "") if ended else "",
            sentence=ended.last_error() if ended else None,
        )

    def ask_what_is_awaited(self) -> None:
        if self._child is not None and self._child.exit_code is None:
            os.kill(self._child.pid, signal.SIGUSR1)

    def ask_to_end(self) -> None:
        if self._child is not None:
            self._child.ask_to_end()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def end(self, *, seconds: float = GRACE_SECONDS) -> None:
        """Ask, wait, kill; then nothing of the child is left here but what it wrote into the run's folder."""
        if self._child is not None:
            if seconds:
                self._child.ask_to_end()
            self._child.end(time.monotonic() + seconds)
        if self._run is not None:
            for path in self._published(self._run):
                remove_publication_folder(path)

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()
        shutil.rmtree(self._own, ignore_errors=True)
        for reaper in self._reapers:
            reaper.close()

    @property
    def _announcement(self) -> Path:
        return self._own / "engines" / f"{self._role}.json"

    def _start(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        (self._own / "log").touch()
        with (self._own / "printed").open("a") as printed:  # rank 0's lines are for people; others' go to the log
            self._child = Child(
                self._role,
                arguments,
                log=self._own / "log",
                cpus=(),
                environment=environment_for(self._config.model.dtype, self._config.trainer.dtype) | dict(environment),
                stdout=printed if self._run else None,
            )

    def _news(self, name: str) -> bytes:
        """What was appended to a file since the last time, or a piece of it."""
        if name not in self._sinks:
            if not (self._own / name).exists():
                return b""
            self._sinks[name] = (self._own / name).open("rb")
        return self._sinks[name].read(LARGEST_PIECE)

    def _published(self, run: Path) -> list[Path]:
        return [publication_folder(parent, run) for parent in {self._config.weights.folder, ""}]
