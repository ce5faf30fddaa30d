"""Who starts the processes, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rondo.config.section import Positive, Section


class RayConfig(Section):
    address: str = Field(
        default="",
        description="host:port of the cluster; empty: RAY_ADDRESS, else the cluster that this machine is a node of; "
        "local: one for this run alone.",
    )
    rank_cpus: Positive = Field(default=1, description="CPUs of the cluster that a trainer rank is given.")
    rank_devices: float | None = Field(
        default=None, ge=0, description="Accelerators for a rank; unset: 1 where the cluster has any, unless on CPU."
    )
    engine_cpus: Positive = Field(default=1, description="CPUs of the cluster that an engine is given.")
    engine_devices: float | None = Field(
        default=None,
        ge=0,
        description="Accelerators for an engine; unset: engines.tensor_parallel where the cluster has any, unless on "
        "CPU.",
    )
    accelerator: str = Field(default="GPU", description="What Ray calls an accelerator: GPU, NPU, ...")
    placement: Literal["pack", "spread"] = Field(
        default="pack", description="On as few machines as possible, or on as many."
    )
    lead: str = Field(
        default="",
        description="Address of the machine for rank 0, which keeps the run's folder there; empty: this one if it has "
        "what a rank needs, else any.",
    )
    place_seconds: float = Field(default=60.0, gt=0, description="A cluster that has no room by then is an error.")


class LaunchConfig(Section):
    backend: Literal["local", "ray"] = Field(
        default="local", description="Child processes of this one, or Ray actors on the machines of a cluster."
    )
    silence_seconds: float = Field(
        default=30.0, gt=0, description="When nothing moves for so long, say what is awaited."
    )
    ray: RayConfig = RayConfig()
