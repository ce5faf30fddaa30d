"""How weights travel from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rondo.config.section import Section


class WeightsConfig(Section):
    transport: Literal["auto", "files"] = Field(default="auto", description="How weights travel to the engines.")
    folder: str = Field(
        default="", description="For files; empty: shared memory (/dev/shm), or the run's folder without it."
    )
    delta: Literal[False] = Field(default=False, description="Send only what changed; not built yet.")
