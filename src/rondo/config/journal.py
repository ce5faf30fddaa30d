"""What a run writes down so that it can be proved, replayed and resumed."""

from __future__ import annotations

from pydantic import Field

from rondo.config.section import Section


class JournalConfig(Section):
    enabled: bool = Field(default=True, description="Write every finished group to the run's folder before training.")
    keep: int = Field(default=0, ge=0, description="The newest so many periods are kept; 0: all.")
    hashes: bool = Field(default=True, description="Hash every step's gradient and weights, for verify and replay.")
    max_logp_gap: float = Field(
        default=0.0,
        ge=0,
        description="Stop when a period's mean |engine - trainer| log-prob gap exceeds this: the engines then hold "
        "other weights. 0: 0.001, or 0.1 where engines or trainer compute in half precision; not held where sampling "
        "is off-policy.",
    )
