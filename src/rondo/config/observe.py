"""Who else is told how a run goes. Nothing leaves the machine unless it is asked to here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rondo.config.section import Section


class ObserveConfig(Section):
    sinks: tuple[Literal["tensorboard", "wandb", "trackio", "prometheus"], ...] = Field(
        default=(), description="Where metrics go besides metrics.jsonl; each but prometheus needs its extra."
    )
    samples: int = Field(default=16, ge=0, description="Responses kept per period, to read; four of a prompt.")
    project: str = Field(default="rondo", min_length=1, description="Of wandb and trackio; the run's name is run.name.")
    wandb_mode: Literal["offline", "online"] = Field(
        default="offline", description="offline writes into the run's folder; `wandb sync` sends it later."
    )
    prometheus_host: str = Field(default="127.0.0.1", description="Address of the metrics endpoint.")
    prometheus_port: int = Field(default=9464, ge=0, le=65535, description="Its port; 0: any free one.")
