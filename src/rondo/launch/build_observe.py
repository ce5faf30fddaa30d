"""Builds what looks at a run: its sinks, and what the live view sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rondo.config import Config
from rondo.engines.pool import EnginePool
from rondo.observe.console import Console
from rondo.observe.glance import Watch
from rondo.observe.lane import Lane
from rondo.observe.recorder import Recorder
from rondo.observe.sinks import PrometheusSink, Sink, Sinks, TensorBoardSink, TrackioSink, WandbSink
from rondo.observe.spans import SpanBook
from rondo.rollout.background import Background
from rondo.types import Publication


def build_sinks(config: Config, folder: Path, background: Background, console: Console) -> Sinks:
    observe, tree = config.observe, config.model_dump(mode="json")
    sinks: list[Sink] = []
    for name in observe.sinks:
        match name:
            case "tensorboard":
                sinks.append(TensorBoardSink(folder))
            case "wandb":
                sinks.append(
                    WandbSink(
                        folder, project=observe.project, name=config.run.name, mode=observe.wandb_mode, config=tree
                    )
                )
            case "trackio":
                sinks.append(TrackioSink(folder, project=observe.project, name=config.run.name, config=tree))
            case "prometheus":
                endpoint = PrometheusSink(
                    host=observe.prometheus_host,
                    port=observe.prometheus_port,
                    call=background.call,
                    run=config.run.name,
                )
                console.note(f"metrics for Prometheus at {endpoint.url}")
                sinks.append(endpoint)
    return Sinks(sinks, warn=console.warn)


def build_watch(
    config: Config,
    lane: Lane,
    spans: SpanBook,
    recorder: Recorder,
    pool: EnginePool,
    published: Callable[[], Publication | None],
) -> Watch:
    def version() -> int:
        confirmed = published()
        return -1 if confirmed is None else confirmed.version

    return Watch(
        lane=lane,
        spans=spans,
        recorder=recorder,
        loads=lambda: {seat.engine.url: (seat.in_flight, seat.state.slots) for seat in list(pool.seats)},
        version=version,
        total=config.rollout.prompts_per_period,
    )
