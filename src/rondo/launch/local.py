"""The local launcher: starts engines and trainer as child processes, watches them, tears them down.

It only starts and watches: HTTP and torch.distributed carry everything between the children. Waits for trainer rank 0
to end; another rank that ends first is an error with a name, and ends all; an engine that ends or hangs is started
again (restarts.py). Ctrl-C or SIGTERM asks rank 0 to save and leave; a second one ends at once.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rondo import errors
from rondo.config import Config
from rondo.engines.bearer import TOKEN, run_token
from rondo.errors import DiedError, Interrupted, RondoError
from rondo.launch.commands import engine_arguments
from rondo.launch.cpu import environment_for
from rondo.launch.folder import prepare
from rondo.launch.preflight import check
from rondo.launch.processes import Child, end_all, rank_environment, write_processes
from rondo.launch.restarts import Posts
from rondo.weights.folder import publication_folder, remove_publication_folder

POLL_SECONDS = 0.05
PROGRESS_SECONDS = 10.0
LOST_PEER = 4  # exit code of a trainer rank that ended only because another one had
BLAME_SECONDS = 2.0  # how long to look for that other one


def launch(config: Config, *, resume: bool = False, overwrite: bool = False) -> Path:
    """Run `config` to its end; returns the run's folder. Raises what stopped it."""
    check(config)
    folder = prepare(config, resume=resume, overwrite=overwrite)
    launcher = LocalLauncher(config, folder, resume=resume)
    try:
        launcher.start()
        launcher.watch()
    finally:
        launcher.close()
    return folder


class LocalLauncher:
    def __init__(self, config: Config, folder: Path, *, resume: bool) -> None:
        self._config = config
        self._folder = folder
        self._resume = resume
        self._posts = Posts(
            folder=folder,
            start=self._start_engine,
            limit=config.engines.max_restarts,
            patience=config.engines.start_seconds,
            say=_say,
        )
        self._trainers: list[Child] = []  # by rank
        self._environment = environment_for(config.model.dtype, config.trainer.dtype) | {TOKEN: run_token(folder)}
        self._meeting = folder / "rendezvous"
        self._signals = 0
        self._handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def start(self) -> None:
        """Engines and trainer at once; the trainer waits for the engines' announcements."""
        for number in range(0 if self._config.engines.urls else self._config.engines.count):
            self._posts.open(f"engine-{number}")
        for rank in range(self._config.trainer.ranks):
            self._trainers.append(self._start_trainer(rank))
        self._write_processes()

    def watch(self) -> None:
        progress = Progress(self._config.engines.backend)
        while self._trainers[0].exit_code is None:
            if any(follower.exit_code for follower in self._trainers[1:]):
                raise self._trainer_died()
            if not self._signals and self._posts.tend():
                self._write_processes()
            progress.tell(self._posts.loading)
            if self._signals >= 2:
                raise Interrupted("stopped at once; the last checkpoint is what remains")
            time.sleep(POLL_SECONDS)
        if self._trainers[0].exit_code != 0:
            raise self._trainer_died()

    def close(self) -> None:
        """Rank 0 first: it may still want to save, and its engines and other ranks must not vanish under it."""
        if self._signals >= 2:
            for child in self._children():
                child.end(time.monotonic())
        if any(trainer.exit_code for trainer in self._trainers):  # the other ranks wait for it, perhaps for ever
            for trainer in self._trainers:
                trainer.end(time.monotonic())
        end_all(self._trainers[:1])
        end_all(self._trainers[1:])
        end_all(self._posts.children)
        self._meeting.unlink(missing_ok=True)
        for parent in {self._config.weights.folder, ""}:
            remove_publication_folder(publication_folder(parent, self._folder))
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _children(self) -> list[Child]:
        return [*self._trainers, *self._posts.children]

    def _start_engine(self, name: str) -> Child:
        engines, number = self._config.engines, int(name.rpartition("-")[2])
        return Child(
            name,
            engine_arguments(self._config, self._folder, number),
            log=self._folder / "logs" / f"{name}.log",
            cpus=engines.cpus[number] if engines.cpus else (),
            environment=self._environment,
        )

    def _start_trainer(self, rank: int) -> Child:
        trainer = self._config.trainer
        shown = rank == 0 and _has_descriptor(sys.stdout)
        return Child(
            f"trainer-{rank}",
            ["rank", str(self._folder), *(["--resume"] if self._resume else [])],
            log=self._folder / "logs" / f"trainer-{rank}.log",
            cpus=trainer.cpus[rank :: trainer.ranks] or trainer.cpus,
            environment=self._environment | rank_environment(rank, trainer.ranks, self._meeting),
            stdout=sys.stdout if shown else None,
        )

    def _write_processes(self) -> None:
        write_processes(self._folder / "processes.json", self._children())

    def _trainer_died(self) -> RondoError:
        """What the first rank to end had to say; those that only missed it are not to blame."""
        deadline = time.monotonic() + BLAME_SECONDS
        while True:
            path = self._folder / "error.json"
            if path.exists():
                error = json.loads(path.read_text())
                kind: type[RondoError] = getattr(errors, error["type"])
                return kind(error["message"])
            dead = [trainer for trainer in self._trainers if trainer.exit_code]
            guilty = [trainer for trainer in dead if trainer.exit_code != LOST_PEER]
            if guilty or time.monotonic() > deadline:
                return DiedError((guilty or dead)[0].obituary())
            time.sleep(POLL_SECONDS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        for leader in self._trainers[:1]:
            leader.ask_to_end()


class Progress:
    """A line now and then while engines take their time to start."""

    def __init__(self, backend: str) -> None:
        self._backend = {"vllm": "vLLM"}.get(backend, backend)
        self._began = self._told = time.monotonic()

    def tell(self, loading: list[str]) -> None:
        now = time.monotonic()
        if not loading:
            self._began = self._told = now
        if loading and now - self._told >= PROGRESS_SECONDS:
            self._told = now
            _say(f"{', '.join(loading)}: {self._backend} loading, {now - self._began:.0f} s")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _has_descriptor(stream: object) -> bool:
    """Captured output (a notebook, a test) may not be a real file; the trainer's lines then go to its log."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return False
    return True
