"""What a replay group is asked to do, and what it answers: records that travel as JSON files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rondo.verify.compare import Difference, Rounding


@dataclass(frozen=True, kw_only=True)
class Plan:
    run: str  # the folder of the recorded run
    scratch: str  # this plan's folder; config.json here, states and results too
    start: str  # a checkpoint; empty: the base model
    steps: int  # optimizer steps taken before the start
    chain: tuple[int, ...]  # periods to train again from there
    checked: tuple[int, ...]  # the last of these, which are compared
    threads: int  # per rank, as in the run
    leading_ranks: int  # of the group that goes first: the run's own number
    leading: bool  # whether this is that group
    trials: int = 0  # shuffled arrival orders
    packings: tuple[int, ...] = ()  # other token budgets
    truth: bool = False  # measure the rounding of the synchronous gradient against float64
    as_recorded: bool = False  # compare with the recorded micro-batches' gradient instead of the synchronous one
    synchronous_chain: bool = False  # train the chain once more, synchronously, and compare weights

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        tree = json.loads(path.read_text())
        lists = {key: tuple(value) for key, value in tree.items() if isinstance(value, list)}
        return cls(**tree | lists)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Every tensor of one update under another schedule, against the synchronous one."""

    name: str
    kind: str  # order | packing | ranks: what differs
    what: str  # gradient | weights
    period: int
    update: int
    micros: int  # terms of the sum
    seconds: tuple[float, ...]  # per micro-step
    tensors: tuple[Difference, ...]


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """One recorded step, taken again as it was recorded: hashes as the journal has them, and as found."""

    period: int
    update: int
    recorded: dict[str, Any] | None  # None: the run wrote no hashes
    found: dict[str, Any] | None
    seconds: tuple[float, ...]  # per micro-step

    @property
    def same(self) -> bool:
        return self.recorded is not None and self.recorded == self.found


@dataclass(kw_only=True)
class Results:
    """A group's answer."""

    checks: list[Check] = field(default_factory=list)
    reproduced: list[Reproduced] = field(default_factory=list)
    rounding: dict[str, dict[str, Rounding]] = field(default_factory=dict)  # by "period-update", by tensor
    seconds: dict[str, float] = field(default_factory=dict)
    device: str = ""
    before: str = ""  # hash of the weights at the start

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Results:
        tree = json.loads(path.read_text())
        checks = [
            Check(
                **check
                | {
                    "seconds": tuple(check["seconds"]),
                    "tensors": tuple(Difference(**tensor) for tensor in check["tensors"]),
                }
            )
            for check in tree["checks"]
        ]
        rounding = {
            key: {name: Rounding(**value) for name, value in tensors.items()}
            for key, tensors in tree["rounding"].items()
        }
        reproduced = [Reproduced(**{**found, "seconds": tuple(found["seconds"])}) for found in tree["reproduced"]]
        return cls(**{**tree, "checks": checks, "rounding": rounding, "reproduced": reproduced})

    def merge(self, other: Results) -> None:
        self.checks += other.checks
        self.reproduced += other.reproduced
        self.rounding |= other.rounding
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.device = self.device or other.device
        self.before = self.before or other.before
