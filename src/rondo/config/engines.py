"""What generates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rondo.config.section import Positive, Section


class EnginesConfig(Section):
    backend: Literal["embedded", "vllm"] = Field(
        default="embedded", description="What generates: Rondo's own engine, or vLLM."
    )
    count: Positive = Field(default=1, description="Engines to start.")
    urls: tuple[str, ...] = Field(default=(), description="Engines that already run; then none is started.")
    base_port: int = Field(
        default=0, ge=0, le=65535, description="Engine i listens on base_port + i; 0: any free port."
    )
    slots: Positive = Field(default=64, description="Responses that one engine decodes at once.")
    batch_invariant: bool = Field(
        default=False, description="A sample's bits do not depend on its batch mates (slower; embedded only)."
    )
    max_model_len: int = Field(default=0, ge=0, description="Longest prompt plus response; 0: what the model allows.")
    max_retries: int = Field(
        default=3, ge=0, description="How often a failed request is sent again before the run stops."
    )
    request_seconds: float = Field(default=600.0, gt=0, description="A request that takes longer counts as failed.")
    health_seconds: float = Field(
        default=10.0, gt=0, description="An engine that gives no sign of life within this time, twice, is lost."
    )
    health_every: float = Field(default=2.0, gt=0, description="Seconds between two looks at an engine.")
    max_restarts: int = Field(
        default=5, ge=0, description="How often a started engine is started again, with growing pauses, in ten minutes."
    )
    join_host: str = Field(
        default="127.0.0.1", description="Where engines may join and leave the run; other machines need its token too."
    )
    join_port: int = Field(default=0, ge=0, le=65535, description="Its port; 0: any free one, see control.json.")
    autoscale_command: str = Field(
        default="",
        description="Called with +1 when the trainer waits too much, with -1 when engines idle; empty: never.",
    )
    autoscale_wait: float = Field(
        default=0.3, gt=0, lt=1, description="Share of the trainer's time that it may wait for groups."
    )
    autoscale_idle: float = Field(default=0.5, gt=0, lt=1, description="Share of the engines' time that they may idle.")
    autoscale_periods: Positive = Field(default=3, description="How many periods decide.")
    autoscale_seconds: float = Field(default=60.0, ge=0, description="Shortest time between two calls.")
    start_seconds: float = Field(default=300.0, gt=0, description="An engine that is not ready by then is an error.")
    threads: int = Field(default=0, ge=0, description="CPU threads each; 0: an equal share of the cores.")
    cpus: tuple[tuple[int, ...], ...] = Field(default=(), description="Pin engine i to cpus[i]; empty: do not pin.")
    device: str = Field(default="auto", description="auto: the accelerator if there is one, else the CPU.")
    python: str = Field(
        default="", description="vLLM: an interpreter that has it; empty: this one, else the cached CPU environment."
    )
    tensor_parallel: Positive = Field(default=1, description="vLLM: devices that share one engine.")
    memory_share: float = Field(
        default=0.0, ge=0, le=1, description="vLLM: share of the device's memory it may use; 0: vLLM's own default."
    )
    kv_cache_gib: Positive = Field(default=1, description="vLLM on CPU: memory for keys and values, in GiB.")
    arguments: tuple[str, ...] = Field(default=(), description="vLLM: further words of its command line, as they are.")

    @model_validator(mode="after")
    def _embedded_only(self) -> EnginesConfig:
        if self.backend == "vllm" and self.batch_invariant:
            raise ValueError(
                'engines.batch_invariant is a mode of engines.backend = "embedded": it is not promised for vLLM'
            )
        return self
