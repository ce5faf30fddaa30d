"""A recorded run -> what things cost. From the journal (who was asked when, what came back, what was packed) and
`metrics.jsonl` (where each lane's time went); `spans.jsonl`, where there is one, has every micro-batch by itself.

An engine's slots are replayed in decode steps, so that the moment at which each group was answered is a sum of
steps, rows, keys and prompts; what each of these costs is then a least-squares fit over all groups, with no cost below
zero. A trainer's micro-batches are known in tokens, and their seconds by period: the same fit.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rondo.config import Config, read_config
from rondo.errors import UserError
from rondo.plan.decoder import Amount, Decoder
from rondo.plan.records import Costs, EngineCost, Setting, TrainerCost
from rondo.plan.simulate import has_room
from rondo.plan.training import Piece
from rondo.plan.work import Lengths, SeenGroup
from rondo.rollout.journal import RecordedPeriod, read_period, recorded_periods
from rondo.types import Group

WAITS = ("waiting for first group", "waiting for groups", "waiting for rewards")
KNOWN = (*WAITS, "training", "stepping", "publishing")
PACES = 12  # rounds of fitting costs and paces in turn
NOT_EVERY_PERIOD = ("evaluating", "saving")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A recorded run in numbers."""

    costs: Costs
    lengths: Lengths
    setting: Setting  # as it was run
    seconds: float  # of a recorded period, median
    periods: int  # that were read


def calibrate(folder: Path) -> Calibration:
    """What the run in `folder` tells. Its first period, which warms things up, is left out where there are others."""
    if not (folder / "config.json").exists() or not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} is no run: give the folder that `rondo train` wrote")
    config = read_config(folder / "config.json")
    lines = {line["period"]: line for line in _lines(folder / "metrics.jsonl")}
    known = [period for period in recorded_periods(folder) if period in lines]
    if not known:
        raise UserError(f"{folder} holds no whole period with a journal: train a few with journal.enabled = true")
    used = known[1:] or known
    recorded = [read_period(folder, period) for period in used]
    metrics = [lines[period] for period in used]
    return Calibration(
        costs=Costs(
            engine=engine_cost(recorded, config.engines.slots),
            trainer=trainer_cost(
                recorded, [line["trainer_seconds"].get("training", 0.0) for line in metrics], micro_seconds(folder)
            ),
            step=_median(metrics, "stepping") / config.schedule.updates_per_period * config.trainer.ranks,
            publish=_median(metrics, "publishing"),
            reward=statistics.median(g.scored_at - g.answered_at for r in recorded for g in (*r.groups, *r.filtered)),
            rest=statistics.median(_rest(line["trainer_seconds"]) for line in metrics),
        ),
        lengths=Lengths(groups=tuple(_seen(recorded)), limit=config.rollout.max_new_tokens),
        setting=setting_of(config),
        seconds=statistics.median(sum(_regular(line["trainer_seconds"]).values()) for line in metrics),
        periods=len(used),
    )


def setting_of(config: Config) -> Setting:
    return Setting(
        engines=len(config.engines.urls) or config.engines.count,
        ranks=config.trainer.ranks,
        slots=config.engines.slots,
        prompts=config.rollout.prompts_per_period,
        group_size=config.rollout.group_size,
        max_new_tokens=config.rollout.max_new_tokens,
        micro_tokens=config.trainer.micro_tokens,
        schedule=config.schedule.mode,
        prompt_order=config.schedule.order == "prompt",
        updates=config.schedule.updates_per_period,
        reward_workers=config.rewards.workers,
        engine_devices=config.engines.tensor_parallel if config.engines.backend == "vllm" else 1,
    )


def engine_cost(recorded: Sequence[RecordedPeriod], slots: int) -> EngineCost:
    tables: list[NDArray[np.float64]] = []
    seconds: list[NDArray[np.float64]] = []
    for period in recorded:
        amounts: list[Amount] = []
        answered: list[float] = []
        groups = sorted((*period.groups, *period.filtered), key=lambda group: group.index)
        began = min(group.asked_at for group in groups)
        for engine in sorted({group.answer.engine for group in groups}):
            mine = [group for group in groups if group.answer.engine == engine]
            for group, amount in replay(mine, slots):
                amounts.append(amount)
                answered.append(group.answered_at - began)
        tables.append(np.array([[*amount, 1.0] for amount in amounts]))
        seconds.append(np.array(answered))
    step, row, key, prefill, prompt_token, request = fit_periods(tables, seconds)
    return EngineCost(step=step, row=row, key=key, prefill=prefill, prompt_token=prompt_token, request=request)


def replay(groups: Sequence[Group], slots: int) -> Iterable[tuple[Group, Amount]]:
    """One engine's groups of a period, in their order: each with all that the engine had done when it was whole."""
    decoder, total, in_flight, asked = Decoder(slots), Amount(), 0, 0
    while True:
        while asked < len(groups) and has_room(slots=slots, in_flight=in_flight, n=_size(groups[asked])):
            decoder.submit(asked, len(groups[asked].prompt.token_ids), _lengths(groups[asked]))
            in_flight += _size(groups[asked])
            asked += 1
        total = _add(total, decoder.admit())
        if not decoder.running:
            return
        steps = decoder.next_end()
        total = _add(total, decoder.ahead(steps))
        for done in decoder.run(steps):
            in_flight -= _size(groups[done])
            yield groups[done], total


def trainer_cost(
    recorded: Sequence[RecordedPeriod], seconds: Sequence[float], spans: Mapping[int, Sequence[float]] | None = None
) -> TrainerCost:
    """From each micro-batch's own seconds where `spans` has them; else from whole periods, where what a micro-batch
    costs by itself shows only as far as their number varies."""
    tables: list[NDArray[np.float64]] = []
    measured: list[NDArray[np.float64]] = []
    for period, whole in zip(recorded, seconds, strict=True):
        micros = micro_pieces(period)
        single = (spans or {}).get(period.period, ())
        if micros and len(single) == len(micros):
            tables.append(np.array([[1.0, piece.tokens, piece.pairs] for piece in micros]))
            measured.append(np.array(single))
        else:
            sums = [len(micros), sum(p.tokens for p in micros), sum(p.pairs for p in micros)]
            tables.append(np.array([sums], float))
            measured.append(np.array([whole]))
    alone = all(len(one) == 1 for one in measured)  # then a period's pace cannot be told from its work
    fitted = fit(np.concatenate(tables), np.concatenate(measured)) if alone else fit_periods(tables, measured)
    micro, token, pair = fitted
    return TrainerCost(micro=micro, token=token, pair=pair)


def micro_seconds(folder: Path) -> dict[int, list[float]]:
    """Of every period in spans.jsonl: how long each micro-batch with tokens took, in order."""
    path = folder / "spans.jsonl"
    found: dict[int, list[float]] = {}
    for line in _lines(path) if path.exists() else ():
        stretches = (stretch for stretch in line["lanes"].get("trainer", ()) if stretch[0] == "training")
        found[line["period"]] = [end - start for _, start, end, *about in stretches if about and about[-1]]
    return found


def micro_pieces(period: RecordedPeriod) -> list[Piece]:
    """Every micro-batch that was trained, as one piece."""
    groups = {group.index: group for group in period.groups}
    found = []
    for update in period.updates:
        for micro in update.micros:
            if micro.parts:
                tokens, pairs = 0, 0.0
                for index, first, last in micro.parts:
                    prompt, lengths = len(groups[index].prompt.token_ids), _lengths(groups[index])[first:last]
                    tokens += prompt + sum(lengths)
                    pairs += prompt**2 / 2 + sum(n * (prompt + n / 2) for n in lengths)
                found.append(Piece(tokens, pairs))
    return found


def fit_periods(tables: Sequence[NDArray[np.float64]], seconds: Sequence[NDArray[np.float64]]) -> list[float]:
    """One fit for all periods, each at a pace of its own: a machine that is busier in one of them would otherwise look
    like a cost of whatever that period had more of. The costs are those of the period with the median pace."""
    paces = np.ones(len(tables))
    costs = [0.0]
    for _ in range(PACES):
        paced = [one / pace for one, pace in zip(seconds, paces, strict=True)]
        costs = fit(np.concatenate(tables), np.concatenate(paced))
        foreseen = [table @ np.array(costs) for table in tables]
        paces = np.array(
            [float(f @ s) / float(f @ f) if f.any() else 1.0 for f, s in zip(foreseen, seconds, strict=True)]
        )
        paces /= np.median(paces) or 1.0
    return costs


def fit(table: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Least squares with no coefficient below zero: all choices of columns are tried, they are few."""
    scale = np.abs(table).max(axis=0)
    best, answer = float("inf"), np.zeros(table.shape[1])
    for count in range(1, table.shape[1] + 1):
        for columns in map(list, combinations(range(table.shape[1]), count)):
            if not scale[columns].all():
                continue
            found = np.linalg.lstsq(table[:, columns] / scale[columns], seconds, rcond=1e-6)[0]
            error = float(((table[:, columns] / scale[columns] @ found - seconds) ** 2).sum())
            if (found >= 0).all() and error < best * (1 - 1e-3):  # a column more must be worth it
                best, answer = error, np.zeros(table.shape[1])
                answer[columns] = found / scale[columns]
    return [float(value) for value in answer]


def _seen(recorded: Sequence[RecordedPeriod]) -> Iterable[SeenGroup]:
    for period in recorded:
        trained = {index for u in period.updates for m in u.micros for index, _, _ in m.parts}
        for kept, groups in ((True, period.groups), (False, period.filtered)):
            for group in groups:
                stopped = tuple(response.stopped for response in group.answer.responses)
                yield SeenGroup(len(group.prompt.token_ids), _lengths(group), stopped, group.index in trained, kept)


def _lengths(group: Group) -> tuple[int, ...]:
    return tuple(len(response.token_ids) for response in group.answer.responses)


def _size(group: Group) -> int:
    return len(group.answer.responses)


def _add(one: Amount, other: Amount) -> Amount:
    return Amount(
        steps=one.steps + other.steps,
        rows=one.rows + other.rows,
        keys=one.keys + other.keys,
        prefills=one.prefills + other.prefills,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _regular(seconds: dict[str, float]) -> dict[str, float]:
    """Without what comes every so many periods."""
    return {state: value for state, value in seconds.items() if state not in NOT_EVERY_PERIOD}


def _rest(seconds: dict[str, float]) -> float:
    return sum(value for state, value in _regular(seconds).items() if state not in KNOWN)


def _median(metrics: Sequence[dict[str, Any]], state: str) -> float:
    return statistics.median(float(line["trainer_seconds"].get(state, 0.0)) for line in metrics)
