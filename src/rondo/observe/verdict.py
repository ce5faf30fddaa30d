"""What bounds a run, how much of the possible overlap it reached, and one sentence of advice with a number.

Pure functions of the lines of `metrics.jsonl`. Each cure is tried on a small model of the period: the trainer's part
lasts as long as the slower of generation (plus what is left to train after it) and training (after the first group).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

WARM_UP = 1  # periods that are left out where there are enough others: caches and compilers were cold
ENOUGH = 3
WORTH_SAYING = 0.05  # of a period


@dataclass(frozen=True, kw_only=True)
class Period:
    """A run's mean period, in seconds."""

    seconds: float
    training: float
    first_group: float
    waiting: float
    rewards: float
    publishing: float
    evaluating: float
    generation: float
    tail: float
    backlog: float
    overlap: float
    micro_steps: float
    engines: int
    ranks: int
    synchronous: bool


@dataclass(frozen=True, kw_only=True)
class Verdict:
    bound: str  # generation | training | first group | tail | rewards | publication | evaluation | schedule | nothing
    overlap: float | None  # of the possible, reached; None: there was nothing to overlap
    overlap_seconds: float
    possible_seconds: float
    seconds: float  # of a period
    better: float  # of a period, as advised
    headline: str  # whether it overlapped, and by how much
    times: str
    advice: str


def mean_period(lines: Sequence[Mapping[str, Any]], *, ranks: int = 1, synchronous: bool = False) -> Period | None:
    """Of lines that have spans; None where there are none."""
    told = [line for line in lines if "overlap_seconds" in line]
    if not told:
        return None
    if len(told) >= ENOUGH:
        told = told[WARM_UP:]

    def trainer(*states: str) -> float:
        return fmean(sum(line["trainer_seconds"].get(state, 0.0) for state in states) for line in told)

    def value(name: str) -> float:
        return fmean(float(line.get(name, 0.0)) for line in told)

    return Period(
        seconds=value("seconds"),
        training=trainer("training", "packing"),
        first_group=trainer("waiting for first group"),
        waiting=trainer("waiting for groups"),
        rewards=trainer("waiting for rewards"),
        publishing=trainer("publishing"),
        evaluating=trainer("evaluating"),
        generation=value("generation_seconds"),
        tail=value("tail_seconds"),
        backlog=value("backlog_seconds"),
        overlap=value("overlap_seconds"),
        micro_steps=max(1.0, value("micro_steps")),
        engines=max(1, max(len(line["engine_seconds"]) for line in told)),
        ranks=ranks,
        synchronous=synchronous,
    )


@dataclass(frozen=True, kw_only=True)
class Cure:
    bound: str
    saved: float
    words: str  # that end in: would cut a period from A to B
    why: str


def judge(period: Period) -> Verdict:
    possible = min(period.generation, period.training)
    reached = min(1.0, period.overlap / possible) if possible > 0.01 * period.seconds else None
    best = max(cures(period), key=lambda cure: cure.saved)
    better = period.seconds - best.saved
    if best.saved < WORTH_SAYING * period.seconds:
        bound, advice = "nothing", "Nothing stands out: no single change would cut a period by more than 5 %."
    else:
        bound = best.bound
        advice = f"{best.why}; {best.words} would cut a period from {_s(period.seconds)} to {_s(better)}."
    return Verdict(
        bound=bound,
        overlap=reached,
        overlap_seconds=period.overlap,
        possible_seconds=possible,
        seconds=period.seconds,
        better=better,
        headline=_headline(period, reached),
        times=f"A period takes {_s(period.seconds)}, with {_s(period.generation)} of generating and "
        f"{_s(period.training)} of training.",
        advice=advice,
    )


def cures(period: Period) -> list[Cure]:
    """Every change worth a thought and the seconds of a period that it would save."""
    excess = max(0.0, period.tail - 0.1 * period.generation)  # generation that more engines do not shorten
    more = period.engines / (period.engines + 1)
    quicker = (period.generation - excess) * (1 - more)
    wider = period.ranks / (period.ranks + 1)
    waits = period.first_group + period.waiting + period.rewards
    found = [
        Cure(
            bound="generation",
            saved=_less_generation(period, quicker),
            words=f"{_another('engine', period.engines)} on a device of its own",
            why=f"Generation bounds this run ({_s(period.generation)} of a period)",
        ),
        Cure(
            bound="training",
            saved=_less_training(period, wider),
            words=f"{_another('trainer rank', period.ranks)} on a device of its own",
            why=f"Training bounds this run ({_s(period.training)} of a period)",
        ),
        Cure(
            bound="tail",
            saved=_less_generation(period, excess),
            words="a lower rollout.max_new_tokens that ends them with the others",
            why=f"A few long responses bound this run: the last tenth of the groups takes {_s(period.tail)}",
        ),
        Cure(
            bound="first group",
            saved=0.0 if period.synchronous else min(period.first_group / 2, waits),
            words="a first group in half the time (fewer engines.slots, or a smaller rollout.group_size)",
            why=f"The wait for the first group bounds this run ({_s(period.first_group)} of a period)",
        ),
        Cure(
            bound="rewards",
            saved=period.rewards,
            words="rewards that keep pace (more rewards.workers)",
            why=f"Rewards bound this run: the trainer waits for them {_s(period.rewards)} of a period",
        ),
        Cure(
            bound="publication",
            saved=period.publishing / 2,
            words="a publication in half the time (weights.transport, weights.delta)",
            why=f"Publication bounds this run ({_s(period.publishing)} of a period)",
        ),
        Cure(
            bound="evaluation",
            saved=period.evaluating / 2,
            words="half as many evaluations (eval.every, eval.prompts)",
            why=f"Evaluation bounds this run ({_s(period.evaluating)} of a period)",
        ),
    ]
    if period.synchronous:
        found.append(
            Cure(
                bound="schedule",
                saved=max(0.0, min(period.generation, period.training) * (1 - 1 / period.micro_steps)),
                words='schedule.mode = "periodic"',
                why="Training waits until all is generated",
            )
        )
    return found


def _less_generation(period: Period, less: float) -> float:
    """No more than the trainer waits for groups after the first: below that it is training that bounds."""
    return min(less, period.waiting + period.rewards)


def _less_training(period: Period, factor: float) -> float:
    """What is left when the last group is ready shrinks; the rest of training hides behind generation anyway."""
    if period.synchronous:
        return period.training * (1 - factor)
    waits = period.first_group + period.waiting + period.rewards
    floor = max(period.generation + period.backlog / max(1.0, period.micro_steps), waits)
    busy = waits + period.training
    return max(0.0, busy - max(busy - period.training * (1 - factor), floor))


def _headline(period: Period, reached: float | None) -> str:
    if period.synchronous:
        return "Generation and training did not overlap: this is the synchronous schedule."
    if reached is None:
        return "There was next to nothing to overlap."
    return (
        f"Generation and training overlapped for {_s(period.overlap)} of every {_s(period.seconds)} period: "
        f"{reached:.0%} of what is possible."
    )


def _another(what: str, count: int) -> str:
    return f"a second {what}" if count == 1 else f"one more {what}"


def _s(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 20 else f"{seconds:.1f} s" if seconds >= 2 else f"{seconds:.2f} s"
