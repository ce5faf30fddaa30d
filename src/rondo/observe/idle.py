"""Time that adds up: every second of every lane under one name, per period.

The trainer's lane says itself what it does; an engine's says only whether it has requests. What an engine's idle time
means, and what the trainer's waiting is for, follows from what the others did at the same moment: `account` walks over
all lanes at once. `verdict.py` says what bounds a run from what stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rondo.observe.spans import PeriodSpans, Span

TAIL = 0.9  # of the groups have been answered when the tail begins

# Every name that a second can have, in the order in which they are shown.
TRAINER_STATES = (
    "training", "stepping", "packing", "waiting for first group", "waiting for groups", "waiting for rewards",
    "publishing", "evaluating", "saving", "bookkeeping",
)  # fmt: skip
ENGINE_STATES = ("generating", "starved", "idle tail", "publishing", "evaluating", "between periods", "away")


@dataclass(frozen=True, kw_only=True)
class Account:
    """One period's time."""

    seconds: float
    trainer: Mapping[str, float]  # seconds per state; they sum to `seconds`
    engines: Mapping[str, Mapping[str, float]]  # by lane; each sums to `seconds`
    overlap: float  # seconds in which the trainer trained while an engine generated
    generation: float  # from the first request to the last answer
    first_group: float  # from the first request to the first scored group
    tail: float  # from nine tenths of the groups answered to the last
    backlog: float  # training that was left when the last group was ready


def account(spans: PeriodSpans) -> Account:
    trainer = spans.lanes["trainer"]
    engines = {name: lane for name, lane in spans.lanes.items() if name in spans.engines}
    busy = {name: _busy(lane, trainer) for name, lane in engines.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in ("trainer", *engines)}
    overlap = 0.0
    for seconds, middle, states in _moments({"trainer": trainer, **engines}):
        generating = any(states.get(name) == "generating" for name in engines)
        doing = states["trainer"]
        if doing == "waiting for groups" and engines and not generating:
            doing = "waiting for rewards"
        _add(found["trainer"], doing, seconds)
        overlap += seconds if doing == "training" and generating else 0.0
        for name in engines:
            _add(found[name], _engine_state(states.get(name, "away"), doing, middle, busy[name]), seconds)
    answered = sorted(group["arrived"] for group in spans.groups)
    ready = max((group["scored"] for group in spans.groups), default=0.0)
    begins = min((group["sent"] for group in spans.groups), default=0.0)
    return Account(
        seconds=spans.seconds,
        trainer=found["trainer"],
        engines={name: found[name] for name in engines},
        overlap=overlap,
        generation=answered[-1] - begins if answered else 0.0,
        first_group=min((group["scored"] for group in spans.groups), default=0.0) - begins,
        tail=answered[-1] - answered[int(TAIL * (len(answered) - 1))] if answered else 0.0,
        backlog=sum(max(0.0, span.end - max(ready, span.start)) for span in trainer if span.kind == "training"),
    )


def _engine_state(state: str, trainer: str, moment: float, busy: tuple[float, float] | None) -> str:
    if state not in ("generating", "idle"):
        return "away"  # lost, or not here yet
    if trainer in ("publishing", "evaluating"):
        return trainer
    if state == "generating":
        return state
    if busy is None:
        return "starved"
    first, last = busy
    if moment < first or trainer == "saving":
        return "between periods"
    if moment < last:
        return "starved"
    return "between periods" if trainer == "bookkeeping" else "idle tail"


def _busy(engine: Sequence[Span], trainer: Sequence[Span]) -> tuple[float, float] | None:
    """From the engine's first request of the period to its last answer; evaluations are no part of it."""
    evaluations = [span for span in trainer if span.kind == "evaluating"]

    def counts(span: Span) -> bool:
        middle = (span.start + span.end) / 2
        return span.kind == "generating" and not any(one.start <= middle <= one.end for one in evaluations)

    own = [span for span in engine if counts(span)]
    return (own[0].start, own[-1].end) if own else None


def _moments(lanes: Mapping[str, Sequence[Span]]) -> Iterator[tuple[float, float, dict[str, str]]]:
    """Stretches in which no lane changes its state: how long, their middle, and every lane's state."""
    changes = sorted((span.start, name, span.kind) for name, lane in lanes.items() for span in lane)
    end = max((span.end for lane in lanes.values() for span in lane), default=0.0)
    states: dict[str, str] = {}
    for number, (since, name, kind) in enumerate(changes):
        states[name] = kind
        until = changes[number + 1][0] if number + 1 < len(changes) else end
        if until > since and "trainer" in states:
            yield until - since, (since + until) / 2, states


def _add(total: dict[str, float], state: str, seconds: float) -> None:
    total[state] = total.get(state, 0.0) + seconds
