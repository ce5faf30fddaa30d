"""The Ray launcher: a warden per trainer rank and engine, each an actor in a bundle of one placement group.

Like the local launcher it only starts and watches: the wardens start the same child processes, and HTTP and
torch.distributed carry everything between those. It polls every warden, writes the children's logs into the folder
here, hands engines' announcements to rank 0's machine, and waits for rank 0 to end. An engine that ends is started
again (on another machine if Ray has to move its actor); a rank that ends is an error with a name, and ends all. When
this process dies, Ray ends its actors, and with its warden every child loses its lifeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rondo import errors
from rondo.config import Config, changed
from rondo.engines.bearer import TOKEN
from rondo.errors import AddressError, ConfigError, DiedError, Interrupted, RondoError
from rondo.launch.bundles import bundles, described, machines
from rondo.launch.local import BLAME_SECONDS, LOST_PEER, Progress
from rondo.launch.news import News
from rondo.launch.processes import GRACE_SECONDS
from rondo.launch.restarts import Posts
from rondo.launch.warden import Look, Warden

try:
    import ray
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"launch.backend = \"ray\" needs Ray, here and on every machine of its cluster: pip install 'rondo-rl[ray]' "
        f"({error})"
    ) from None

POLL_SECONDS = 0.1
CONNECT_SECONDS = 10.0
CALL_SECONDS = 60.0  # an actor that does not answer by then is given up


def launch(config: Config, *, resume: bool = False, overwrite: bool = False) -> Path:
    """Run `config` to its end; returns the run's folder, which is on rank 0's machine. Raises what stopped it."""
    if not config.trainer.threads and config.trainer.accumulation != "exact":
        config = changed(config, "trainer.threads", config.launch.ray.rank_cpus)
    connect(config)
    try:
        launcher = RayLauncher(config, resume=resume)
        try:
            folder = launcher.start(overwrite=overwrite)
            launcher.watch()
        finally:
            launcher.close()
    finally:
        ray.shutdown()
    return folder


def connect(config: Config) -> None:
    address = config.launch.ray.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if ":" in address and "//" not in address:  # Ray would try for long, and say so in many lines
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        named = f"at launch.ray.address = {address}" if address != "auto" else "on this machine"
        raise AddressError(
            f"there is no Ray cluster {named} ({_first(error)}): start one with `ray start --head`, or set "
            "launch.ray.address"
        ) from None


class Actor(Warden):
    """On a machine of the cluster."""

    def __init__(self, role: str, config: str, *, home: str) -> None:
        super().__init__(role, config, address=ray.util.get_node_ip_address(), home=home)


class Remote:
    """A warden as seen from here, and what it last said of its child."""

    def __init__(self, role: str, actor: Any) -> None:
        self.role = role
        self.actor = actor
        self.node = ""
        self.pid = 0
        self.exit_code: int | None = None
        self.lost = ""  # what Ray says became of the actor
        self.last: Look | None = None
        self._asked: Any = None

    def look(self) -> Look | None:
        """The answer to the last question, if there is one yet; then the next is asked. Raises RayActorError."""
        if self._asked is None:
            self._asked = self.actor.look.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return None
        answer, self._asked = self._asked, None
        look: Look = ray.get(answer)
        self.last, self.node, self.pid, self.exit_code = look, look.node, look.pid, look.exit_code
        return look

    def forget(self) -> None:
        """What was said or asked so far is about a child that is no more."""
        self.last = self._asked = None

    def say(self, name: str, *arguments: Any, seconds: float = CALL_SECONDS, **named: Any) -> Any:
        """A call, and its answer; what the warden raises is raised here, and DiedError when it cannot be reached."""
        try:
            return ray.get(getattr(self.actor, name).remote(*arguments, **named), timeout=seconds)
        except RayTaskError as error:
            if isinstance(error.cause, RondoError):
                raise error.cause from None
            raise
        except (RayActorError, GetTimeoutError) as error:
            raise DiedError(f"{self.role} on {self.node or 'its machine'} cannot be reached: {_first(error)}") from None

    def obituary(self, log: Path) -> str:
        if self.lost:
            return f"{self.role} on {self.node} is gone with its Ray actor ({self.lost}); its log, so far: {log}"
        if self.last is None or not self.last.pid:
            return f"{self.role} is gone with its machine; its log, so far: {log}"
        return f"{self.last.obituary} on {self.node}; its log: {log}"


class Life:
    """One process of an engine, on its warden's machine, until the next is started."""

    def __init__(self, remote: Remote, log: Path, *, problem: str) -> None:
        self.address = ""
        self._remote = remote
        self._log = log
        self._problem = problem  # why it could not be started

    @property
    def pid(self) -> int:
        return self._remote.pid

    @property
    def exit_code(self) -> int | None:
        """A warden without a child is one that Ray has started anew, on this machine or another."""
        look = self._remote.last
        if self._problem or self._remote.lost or (look is not None and not look.pid):
            return 1
        return look.exit_code if look is not None else None

    def ask_to_end(self) -> None:
        with contextlib.suppress(DiedError):
            self._remote.say("ask_to_end")

    def kill(self) -> None:
        with contextlib.suppress(DiedError):
            self._remote.say("kill")
        self._remote.forget()

    def obituary(self) -> str:
        return self._problem or self._remote.obituary(self._log)

    def last_error(self) -> str | None:
        return self._remote.last.sentence if self._remote.last else None


class RayLauncher:
    def __init__(self, config: Config, *, resume: bool) -> None:
        self._config = config
        self._resume = resume
        self._folder = config.run.path.absolute()
        self._group: Any = None
        self._trainers: list[Remote] = []  # by rank
        self._engines: list[Remote] = []
        self._token = ""
        self._news = News()
        self._posts: Posts[Life] = Posts(
            folder=self._news.folder,
            start=self._start_engine,
            limit=config.engines.max_restarts,
            patience=config.engines.start_seconds,
            say=_say,
        )
        self._signals, self._told_to_end = 0, False
        self._question = False
        self._handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_question)

    def start(self, *, overwrite: bool) -> Path:
        """Place everything, prepare the run's folder on rank 0's machine, then start all children at once."""
        asked = self._place()
        ranks = self._config.trainer.ranks
        remotes = [
            Remote(f"trainer-{number}" if number < ranks else f"engine-{number - ranks}", None)
            for number in range(len(asked))
        ]
        for number, remote in enumerate(remotes):
            remote.actor = self._actor(number, remote.role, asked[number], restarts=0 if number < ranks else -1)
        self._trainers, self._engines = remotes[:ranks], remotes[ranks:]
        leader = self._trainers[0]
        folder, self._token = leader.say("prepare", resume=self._resume, overwrite=overwrite)
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        host, port = leader.say("meeting")
        for remote in remotes:
            remote.node = remote.say("meeting")[0]
            self._log(remote).touch()
        for engine in self._engines:
            self._posts.open(engine.role)
        for rank, trainer in enumerate(self._trainers):
            words = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": host, "MASTER_PORT": port}
            trainer.say("start_rank", {key: str(value) for key, value in words.items()}, resume=self._resume)
        return Path(folder)

    def watch(self) -> None:
        progress = Progress(self._config.engines.backend)
        leader = self._trainers[0]
        while leader.exit_code is None:
            for remote in [*self._trainers, *self._engines]:
                self._look_at(remote)
            if any(trainer.lost or trainer.exit_code for trainer in self._trainers):
                raise self._trainer_died()
            if not self._signals and self._posts.tend():
                leader.say("deliver", self._news.changes())
                self._write_processes()
            progress.tell(self._posts.loading)
            if self._question:
                self._question = False
                leader.say("ask_what_is_awaited")
            if self._signals and not self._told_to_end:
                self._told_to_end = True
                leader.say("ask_to_end")
            if self._signals >= 2:
                raise Interrupted("stopped at once; the last checkpoint is what remains")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Rank 0 first: it may still want to save, and its engines and other ranks must not vanish under it."""
        failed = any(trainer.lost or trainer.exit_code for trainer in self._trainers)
        patience = 0.0 if self._signals >= 2 or failed else GRACE_SECONDS
        for remotes in (self._trainers[:1], self._trainers[1:], self._engines):
            self._end(remotes, patience)
        self._news.close()
        if self._group is not None:
            remove_placement_group(self._group)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _place(self) -> list[dict[str, float]]:
        settings = self._config.launch.ray
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = sorted(
            ((str(node["NodeManagerAddress"]), node["Resources"]) for node in alive), key=lambda node: node[0]
        )
        asked = bundles(self._config, nodes, ray.util.get_node_ip_address())
        if settings.lead and settings.lead not in [address for address, _ in nodes]:
            raise ConfigError(
                f"launch.ray.lead = {settings.lead} is no machine of the cluster: it has "
                f"{machines(nodes, settings.accelerator)}"
            )
        self._group = placement_group(asked, strategy=settings.placement.upper())
        if not self._group.wait(settings.place_seconds):
            raise ConfigError(
                f"the Ray cluster had no room for {described(asked)} within launch.ray.place_seconds = "
                f"{settings.place_seconds:g}: it has {machines(nodes, settings.accelerator)}, and others may use some "
                "of it; ask for less, or add machines"
            )
        return asked

    def _actor(self, number: int, role: str, bundle: dict[str, float], *, restarts: int) -> Any:
        named = {"CPU", "GPU"}
        kind = ray.remote(Actor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources={name: amount for name, amount in bundle.items() if name not in named},
            max_restarts=restarts,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=number
            ),
        )
        return kind.remote(role, self._config.model_dump_json(), home=os.getcwd())

    def _look_at(self, remote: Remote) -> None:
        try:
            look = remote.look()
        except ActorUnavailableError:  # Ray is starting it again, or the network is slow
            return
        except RayActorError as error:
            remote.lost = _first(error)
            return
        if look is None:
            return
        self._take(remote, look)
        if look.announced:
            self._news.hear(f"{remote.role}.json", look.announced)
        for name, text in look.words.items():
            self._news.hear(name, text)

    def _take(self, remote: Remote, look: Look) -> None:
        if look.log:
            with self._log(remote).open("ab") as log:
                log.write(look.log)
        if look.printed:
            sys.stdout.write(look.printed.decode(errors="replace"))
            sys.stdout.flush()

    def _start_engine(self, name: str) -> Life:
        """Where all are on one machine it listens to that machine alone."""
        number = [engine.role for engine in self._engines].index(name)
        alone = len({remote.node for remote in [*self._trainers, *self._engines]}) == 1
        engine, problem = self._engines[number], ""
        try:
            engine.say("start_engine", number, {TOKEN: self._token}, alone=alone)
        except DiedError as error:  # Ray has no room for its warden yet
            problem = str(error)
        engine.forget()
        return Life(engine, self._log(engine), problem=problem)

    def _trainer_died(self) -> RondoError:
        """What the first rank to end had to say; those that only missed it are not to blame."""
        deadline = time.monotonic() + BLAME_SECONDS
        while True:
            for trainer in self._trainers:
                self._look_at(trainer)
            for trainer in self._trainers:
                if trainer.last is not None and trainer.last.error:
                    left = json.loads(trainer.last.error)
                    kind: type[RondoError] = getattr(errors, left["type"])
                    return kind(left["message"])
            dead = [trainer for trainer in self._trainers if trainer.lost or trainer.exit_code]
            guilty = [trainer for trainer in dead if trainer.exit_code != LOST_PEER]
            if guilty or time.monotonic() > deadline:
                first = (guilty or dead)[0]
                return DiedError(first.obituary(self._log(first)))
            time.sleep(POLL_SECONDS)

    def _end(self, remotes: list[Remote], patience: float) -> None:
        """All at once; then their last words, and nothing of them is left."""
        remotes = [remote for remote in remotes if remote.actor is not None and not remote.lost]
        answers = [remote.actor.end.remote(seconds=patience) for remote in remotes]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=patience + CALL_SECONDS)
        for remote in remotes:
            with contextlib.suppress(DiedError):  # its machine is gone
                while (look := remote.say("look")).log or look.printed:
                    self._take(remote, look)
                remote.say("close")
            ray.kill(remote.actor)

    def _log(self, remote: Remote) -> Path:
        return self._folder / "logs" / f"{remote.role}.log"

    def _write_processes(self) -> None:
        records: list[dict[str, Any]] = [
            {"role": "launcher", "pid": os.getpid(), "address": "", "node": ray.util.get_node_ip_address()}
        ]
        addresses = {post.name: post.child.address for post in self._posts.posts}
        for remote in [*self._trainers, *self._engines]:
            where = {"address": addresses.get(remote.role, ""), "node": remote.node}
            records.append({"role": remote.role, "pid": remote.pid, **where})
        aside = self._folder / "processes.partial"
        aside.write_text(json.dumps(records, indent=2) + "\n")
        os.replace(aside, self._folder / "processes.json")

    def _on_question(self, number: int, frame: FrameType | None) -> None:
        self._question = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1  # Ray's own calls are not made in the middle of another: the loop looks at it


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _first(error: Exception) -> str:
    """Ray's messages have many lines; the first says what happened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".: ")
