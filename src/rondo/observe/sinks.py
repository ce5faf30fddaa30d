"""Sinks: who else is told of every finished period. Each library is imported in its own class and nowhere else.

All are called from the trainer's thread between two periods, with the numbers of the period's line. Prometheus is
asked, not told: its endpoint lives on the background loop and shows the last numbers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from rondo.errors import AddressError, UserError


class Sink(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """A period's line as flat numbers: seconds/trainer/training, seconds/engine-0/generating, reward_mean, ..."""
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}/{key.replace(' ', '_')}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[name] = float(value)

    for name, value in line.items():
        if name == "engine_seconds":
            for number, seconds in enumerate(value):
                add(f"seconds/engine-{number}", seconds)
        elif name == "trainer_seconds":
            add("seconds/trainer", value)
        else:
            add(name, value)
    return found


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        with _library("tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    def __init__(self, folder: Path, *, project: str, name: str, mode: str, config: Mapping[str, Any]) -> None:
        with _library("wandb", "wandb"):
            import wandb
        self._teardown: Callable[[], None] = wandb.teardown
        self._run: Any = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            mode=mode,
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),  # the terminal is ours
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # its helper process writes the rest and ends


class TrackioSink:
    """trackio keeps a local database, in its own folder unless TRACKIO_DIR says otherwise: here, the run's."""

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        os.environ["TRACKIO_DIR"] = os.environ.get("TRACKIO_DIR") or str(folder / "trackio")
        with _library("trackio", "trackio"):
            import trackio
        self._trackio: Any = trackio
        trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._trackio.log(dict(numbers), step=step)

    def close(self) -> None:
        self._trackio.finish()


class PrometheusSink:
    """`/metrics` in Prometheus' text format."""

    def __init__(self, *, host: str, port: int, call: Callable[[Coroutine[Any, Any, Any]], Any], run: str) -> None:
        self._call = call
        self._run = run
        self._text = ""
        application = web.Application()
        application.add_routes([web.get("/metrics", self._show)])
        self._runner = web.AppRunner(application, access_log=None)
        self.url: str = call(self._start(host, port))

    async def _start(self, host: str, port: int) -> str:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise AddressError(
                f"observe.prometheus_port: cannot listen on {host}:{port} ({error.strerror or error}): choose another, "
                "or 0 for any free one"
            ) from error
        return f"http://{host}:{self._runner.addresses[0][1]}/metrics"

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(text=self._text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._text = exposition({"period": float(step), **numbers}, run=self._run)

    def close(self) -> None:
        self._call(self._runner.cleanup())


def exposition(numbers: Mapping[str, float], *, run: str) -> str:
    """Prometheus' text format: one gauge per number; the seconds of lanes are one, labelled."""
    label = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    families: dict[str, list[str]] = {}
    for name, value in numbers.items():
        labels = f'run="{label}"'
        if name.startswith("seconds/"):
            _, lane, state = name.split("/", 2)
            name, labels = "lane_seconds", f'{labels},lane="{lane}",state="{state}"'
        metric = "rondo_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        families.setdefault(metric, []).append(f"{metric}{{{labels}}} {value!r}")
    return "".join(f"# TYPE {metric} gauge\n" + "\n".join(lines) + "\n" for metric, lines in families.items())


class _library:  # noqa: N801  (reads as a phrase: with _library(...))
    """An import that may fail because an extra was not installed."""

    def __init__(self, sink: str, extra: str) -> None:
        self._words = f'observe.sinks has "{sink}", which is not installed: pip install "rondo-rl[{extra}]"'

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ImportError):
            raise UserError(self._words) from error


class Sinks:
    """All sinks of a run."""

    def __init__(self, sinks: Sequence[Sink], *, warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn

    def write(self, line: Mapping[str, Any]) -> None:
        if self._sinks and "period" in line:
            numbers = numbers_of({name: value for name, value in line.items() if name not in ("period", "version")})
            for sink in list(self._sinks):
                self._try(sink, partial(sink.write, line["period"], numbers))

    def close(self) -> None:
        for sink in list(self._sinks):
            self._try(sink, sink.close)

    def _try(self, sink: Sink, action: Callable[[], None]) -> None:
        """A run is worth more than its mirror: a sink that fails is named and left out from then on."""
        try:
            action()
        except Exception as error:
            self._sinks.remove(sink)
            self._warn(f"{type(sink).__name__} failed and is told no more: {type(error).__name__}: {error}")
