"""What a period costs, what it is asked to do, and what it came to. All times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["periodic", "synchronous"]
Bound = Literal["training", "generation", "tail", "first group", "rewards", "stepping", "publishing", "rest"]


@dataclass(frozen=True, kw_only=True)
class EngineCost:
    """One engine. A decode step draws one token for every running sample, its row."""

    step: float  # per decode step, however many rows it has
    row: float  # per row of a step
    key: float = 0.0  # per key that a row reads in a step
    prefill: float = 0.0  # per prompt, run once for all samples of its group
    prompt_token: float = 0.0  # per token of such a prompt
    request: float = 0.0  # between asking and the first step

    def tokens_per_second(self, rows: int, keys: float = 0.0) -> float:
        """Decode speed under a steady load, each row reading `keys` keys."""
        return rows / (self.step + rows * (self.row + self.key * keys) or float("inf"))


@dataclass(frozen=True, kw_only=True)
class TrainerCost:
    """One rank's forward and backward over a micro-batch."""

    micro: float  # per micro-batch, however few its tokens
    token: float  # per token of the packed row
    pair: float = 0.0  # per query-key pair that attention computes
    round: float = 0.0  # more, per micro-batch, where ranks run it together


@dataclass(frozen=True, kw_only=True)
class Costs:
    engine: EngineCost
    trainer: TrainerCost
    step: float  # an optimizer step of one rank that holds all parameters; shared out among ranks
    publish: float
    reward: float  # of scoring one group, in one worker
    rest: float = 0.0  # of a period: what none of these is


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What may be changed."""

    engines: int
    ranks: int
    slots: int  # per engine
    prompts: int  # trained groups per period
    group_size: int
    max_new_tokens: int
    micro_tokens: int
    schedule: Schedule = "periodic"
    prompt_order: bool = False
    updates: int = 1
    reward_workers: int = 1
    engine_devices: int = 1  # per engine

    @property
    def devices(self) -> int:
        return self.engines * self.engine_devices + self.ranks


@dataclass(frozen=True, slots=True)
class Task:
    """One group to be: its prompt's tokens and the lengths that its responses will turn out to have."""

    prompt: int
    lengths: tuple[int, ...]
    trained: bool = True  # False: without gradient, or filtered out


@dataclass(frozen=True, slots=True)
class Arrival:
    """A group on its way to the trainer."""

    index: int
    answered: float
    scored: float


@dataclass(frozen=True, kw_only=True)
class Generation:
    arrivals: tuple[Arrival, ...]  # in the order in which they were scored
    drained: float  # when the last sample got a slot: from here on it is the tail
    ended: float
    busy: float  # seconds that engines decoded or prefilled, all together
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One period, on the trainer's clock: the states add up to `seconds`."""

    seconds: float
    states: dict[Bound, float]
    engine_share: float  # of the period that an engine was busy, on average
    trainer_share: float
    samples: int
    tokens: int
    start: float  # of the engines' time: until the first group was answered
    tail: float  # of the engines' time: after every sample had a slot
    generating: float  # the engines' time, all of it
