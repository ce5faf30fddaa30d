"""Every split of N devices between engines and trainer ranks, and other group and batch sizes, ranked."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from rondo.errors import UserError
from rondo.plan.calibrate import Calibration
from rondo.plan.records import Bound, Costs, EngineCost, Outcome, Setting, Task, TrainerCost
from rondo.plan.simulate import finish, generate, simulate

Cost = TypeVar("Cost", EngineCost, TrainerCost)

DRAWS = 4  # periods per prediction: lengths are drawn anew for each
FASTER = 0.8
SPLITS = 24  # that are looked at one by one; of more, some are left out


@dataclass(frozen=True, kw_only=True)
class Prediction:
    setting: Setting
    outcome: Outcome
    synchronous: float  # the same setting under the synchronous schedule
    bound: Bound  # what would have to be faster

    @property
    def samples_per_second(self) -> float:
        return self.outcome.samples / self.outcome.seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    devices: int
    calibration: Calibration
    now: Prediction  # the recorded setting, simulated
    splits: tuple[Prediction, ...]  # of the recorded work, best first
    sizes: tuple[Prediction, ...]  # other group and batch sizes on their best split, most samples per second first


def predict(calibration: Calibration, setting: Setting, *, draws: int = DRAWS) -> Prediction:
    """The mean of several simulated periods."""
    return _both(calibration.costs, setting, drawn(calibration, setting, draws))


def drawn(calibration: Calibration, setting: Setting, draws: int) -> list[list[Task]]:
    return [calibration.lengths.draw(setting, seed) for seed in range(draws)]


def plan(calibration: Calibration, *, devices: int, groups: Sequence[int] = (), prompts: Sequence[int] = ()) -> Plan:
    """Rank every split; then every combination of these group sizes and prompts per period, each on its best split."""
    recorded = calibration.setting
    if devices <= recorded.engine_devices:
        raise UserError(
            f"--devices {devices} leaves none for the trainer: an engine of this run takes {recorded.engine_devices}, "
            "and a rank one more"
        )
    splits = _ranked(calibration, recorded, devices)
    sizes = [
        _ranked(calibration, replace(recorded, group_size=group, prompts=count), devices)[0]
        for group in groups or _around(recorded.group_size)
        for count in prompts or _around(recorded.prompts)
    ]
    return Plan(
        devices=devices,
        calibration=calibration,
        now=predict(calibration, recorded),
        splits=tuple(splits),
        sizes=tuple(sorted(sizes, key=lambda found: -found.samples_per_second)),
    )


def _ranked(calibration: Calibration, setting: Setting, devices: int) -> list[Prediction]:
    work = drawn(calibration, setting, DRAWS)
    looked_at: dict[int, Prediction] = {}

    def look(engines: Iterable[int]) -> None:
        for count in set(engines) - looked_at.keys():
            ranks = devices - count * setting.engine_devices
            looked_at[count] = _both(calibration.costs, replace(setting, engines=count, ranks=ranks), work)

    most = (devices - 1) // setting.engine_devices
    stride = max(1, most // SPLITS)
    look([*range(1, most + 1, stride), most])
    while stride > 1:  # closer around the best
        best = min(looked_at, key=lambda count: looked_at[count].outcome.seconds)
        finer = max(1, stride // 8)
        look(count for count in range(best - stride, best + stride + 1, finer) if 1 <= count <= most)
        stride = finer
    return sorted(looked_at.values(), key=lambda found: found.outcome.seconds)


def bound_of(work: Sequence[Sequence[Task]], setting: Setting, costs: Costs) -> Bound:
    """What shortens the period most when it takes a fifth less time; of the engines, which part of their work."""
    outcome = average([simulate(tasks, setting, costs) for tasks in work])

    def gain(faster: Costs) -> float:
        return outcome.seconds - statistics.fmean(simulate(tasks, setting, faster).seconds for tasks in work)

    gains: dict[Bound, float] = {
        "training": gain(replace(costs, trainer=scaled(costs.trainer, FASTER))),
        "generation": gain(replace(costs, engine=scaled(costs.engine, FASTER))),
        "rewards": gain(replace(costs, reward=FASTER * costs.reward)),
        "stepping": (1 - FASTER) * outcome.states["stepping"],
        "publishing": (1 - FASTER) * outcome.states["publishing"],
        "rest": (1 - FASTER) * outcome.states["rest"],
    }
    first = max(gains, key=lambda bound: gains[bound])
    if first != "generation":
        return first
    between = outcome.generating - outcome.start - outcome.tail
    parts: dict[Bound, float] = {"generation": between, "tail": outcome.tail, "first group": outcome.start}
    return max(parts, key=lambda part: parts[part])


def scaled(cost: Cost, factor: float) -> Cost:
    """All of it faster or slower."""
    return replace(cost, **{field.name: factor * getattr(cost, field.name) for field in fields(cost)})


def _both(costs: Costs, setting: Setting, work: Sequence[Sequence[Task]]) -> Prediction:
    waiting = replace(setting, schedule="synchronous")
    generated = [generate(tasks, setting, costs) for tasks in work]
    return Prediction(
        setting=setting,
        outcome=average([finish(*both, setting, costs) for both in zip(work, generated, strict=True)]),
        bound=bound_of(work[:2], setting, costs),
        synchronous=statistics.fmean(
            finish(*both, waiting, costs).seconds for both in zip(work, generated, strict=True)
        ),
    )


def average(outcomes: Sequence[Outcome]) -> Outcome:
    mean = statistics.fmean
    states: dict[Bound, float] = {
        state: mean(outcome.states[state] for outcome in outcomes) for state in outcomes[0].states
    }
    return Outcome(
        seconds=sum(states.values()),
        states=states,
        engine_share=mean(outcome.engine_share for outcome in outcomes),
        trainer_share=mean(outcome.trainer_share for outcome in outcomes),
        samples=round(mean(outcome.samples for outcome in outcomes)),
        tokens=round(mean(outcome.tokens for outcome in outcomes)),
        start=mean(outcome.start for outcome in outcomes),
        tail=mean(outcome.tail for outcome in outcomes),
        generating=mean(outcome.generating for outcome in outcomes),
    )


def _around(value: int) -> list[int]:
    return sorted({max(1, value // 2), value, 2 * value})
