"""How weights travel from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rondo.config.section import Positive, Section


class WeightsConfig(Section):
    transport: Literal["auto", "files", "http", "ipc", "nccl"] = Field(
        default="auto",
        description="files: shared memory or a shared disk; http: fetched by engines on other hosts; ipc: device "
        "memory shared on one host (vLLM); nccl: broadcast between devices (vLLM). auto: ipc where trainer and vLLM "
        "share accelerators of this host, files for other engines here, http for engines elsewhere.",
    )
    folder: str = Field(
        default="", description="For files; empty: shared memory (/dev/shm), or the run's folder without it."
    )
    host: str = Field(
        default="",
        description="For http and nccl: the address of the trainer's machine, as engines see it; empty: the one by "
        "which it reaches them.",
    )
    keep: bool = Field(
        default=True,
        description="For ipc and nccl: write each publication to host memory too, for engines that join or come back "
        "within a period (files and http have it anyway). Without it they wait for the next publication.",
    )
    delta: bool = Field(
        default=False, description="For files and http: send only the numbers that changed, losslessly."
    )
    bucket_mb: Positive = Field(default=256, description="What travels at once; two of these are held at a time.")
    probe_gap: float = Field(
        default=0.0,
        ge=0,
        description="Largest mean difference per token between the engines' and the trainer's log-probs of a probe "
        "text after a publication; 0: by model.dtype and trainer.dtype (1e-3 in float32, 5e-2 in bfloat16, 1e-2 in "
        "float16; the larger one).",
    )

    @model_validator(mode="after")
    def _for_the_wire(self) -> WeightsConfig:
        if self.delta and self.transport in ("ipc", "nccl"):
            raise ValueError(
                f'weights.delta = true saves bytes on a wire, and weights.transport = "{self.transport}" has none: '
                "unset one of them"
            )
        return self
