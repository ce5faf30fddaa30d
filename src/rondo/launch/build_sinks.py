"""Builds a run's sinks from the config."""

from __future__ import annotations

from pathlib import Path

from rondo.config import Config
from rondo.observe.console import Console
from rondo.observe.sinks import PrometheusSink, Sink, Sinks, TensorBoardSink, TrackioSink, WandbSink
from rondo.rollout.background import Background


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
