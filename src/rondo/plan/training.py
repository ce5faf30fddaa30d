"""The trainer's half of a period: groups as they arrive, in rounds of one pack per rank; the loader's rules in numbers.

In a round every rank takes a pack of at most `micro_tokens`; the dearest pack decides how long it lasts. What is there
is trained at once; with several ranks the loader waits for something for each, but no longer than the last round took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from typing import NamedTuple

from rondo.plan.records import Arrival, Costs, Generation, Setting, Task, TrainerCost


class Piece(NamedTuple):
    """Some responses of a group with their prompt: what is packed."""

    tokens: int
    pairs: float


@dataclass(kw_only=True)
class Training:
    training: float = 0.0
    stepping: float = 0.0
    rounds: int = 0
    waits: list[tuple[float, Arrival, bool]] = field(default_factory=list)  # since when, for whom, the period's first


def pieces(task: Task, budget: int) -> list[Piece]:
    """The group whole, or split by responses where it exceeds the budget."""
    found, tokens, pairs = [], task.prompt, task.prompt**2 / 2
    if task.prompt + sum(task.lengths) <= budget:
        return [Piece(task.prompt + sum(task.lengths), pairs + sum(_pairs(task.prompt, n) for n in task.lengths))]
    count = 0
    for length in task.lengths:
        if count and tokens + length > budget:
            found.append(Piece(tokens, pairs))
            count, tokens, pairs = 0, task.prompt, task.prompt**2 / 2
        tokens += length
        pairs += _pairs(task.prompt, length)
        count += 1
    return [*found, Piece(tokens, pairs)]


def fitting(backlog: Sequence[Piece], budget: int, ranks: int) -> int:
    """How many of the first pieces fill a round: each goes to the first rank with room, and one alone may exceed."""
    if len(backlog) <= ranks:
        return len(backlog)
    width = 1 << (ranks - 1).bit_length()
    # A tree over the ranks: each node holds the most room below it, so that the first rank with enough is found fast.
    room = [math.inf] * (width + ranks) + [-1.0] * (width - ranks)
    for node in range(width - 1, 0, -1):
        room[node] = max(room[2 * node], room[2 * node + 1])
    for count, piece in enumerate(backlog):
        if room[1] < piece.tokens:
            return count
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= piece.tokens else 2 * node + 1
        room[node] = (budget if room[node] == math.inf else room[node]) - piece.tokens
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return len(backlog)


def round_seconds(taken: Sequence[Piece], ranks: int, cost: TrainerCost) -> float:
    """Dearest piece first, each to the rank with the least to do."""
    prices = sorted((piece.tokens * cost.token + piece.pairs * cost.pair for piece in taken), reverse=True)
    loads = prices[:ranks][::-1]  # one each, and a heap as it is
    for price in prices[ranks:]:
        heapreplace(loads, loads[0] + price)
    return max(loads) + cost.micro + (cost.round if ranks > 1 else 0.0)


def train(tasks: Sequence[Task], generation: Generation, setting: Setting, costs: Costs) -> Training:
    """From the period's start to its last optimizer step."""
    result = Training()
    now = 0.0
    if setting.schedule == "synchronous":
        now = _wait(result, now, min(generation.arrivals, key=lambda arrival: arrival.scored))
        now = _wait(result, now, max(generation.arrivals, key=lambda arrival: arrival.scored))
    for update in range(setting.updates):
        mine = [arrival for arrival in generation.arrivals if arrival.index * setting.updates // len(tasks) == update]
        rounds = _in_prompt_order if setting.prompt_order else _as_they_come
        now = rounds(mine, tasks, setting, costs.trainer, result, now)
        result.stepping += costs.step / setting.ranks
        now += costs.step / setting.ranks
    return result


def _as_they_come(
    arrivals: Sequence[Arrival],
    tasks: Sequence[Task],
    setting: Setting,
    cost: TrainerCost,
    result: Training,
    now: float,
) -> float:
    line = sorted(arrivals, key=lambda arrival: arrival.scored)
    backlog: list[Piece] = []
    taken, patience = 0, 0.0
    while backlog or taken < len(line):
        if not backlog and line[taken].scored > now:
            now = _wait(result, now, line[taken])
        short = setting.ranks - len(backlog)
        if taken < len(line) and short > 0:  # something for every rank, if it comes in time
            now = _wait(result, now, line[min(taken + short, len(line)) - 1], until=now + patience)
        while taken < len(line) and line[taken].scored <= now:
            task = tasks[line[taken].index]
            backlog += pieces(task, setting.micro_tokens) if task.trained else []
            taken += 1
        if backlog:
            count = fitting(backlog, setting.micro_tokens, setting.ranks)
            patience = round_seconds(backlog[:count], setting.ranks, cost)
            del backlog[:count]
            now += patience
            result.training += patience
            result.rounds += 1
    return now


def _in_prompt_order(
    arrivals: Sequence[Arrival],
    tasks: Sequence[Task],
    setting: Setting,
    cost: TrainerCost,
    result: Training,
    now: float,
) -> float:
    """A pack is closed by the piece that no longer fits, so it waits for that one too."""
    pack: list[Piece] = []
    for arrival, piece in _ordered(arrivals, tasks, setting.micro_tokens):
        now = _wait(result, now, arrival) if arrival.scored > now else now
        if pack and fitting([*pack, piece], setting.micro_tokens, setting.ranks) <= len(pack):
            now = _round(pack, setting, cost, result, now)
            pack = []
        pack.append(piece)
    return _round(pack, setting, cost, result, now) if pack else now


def _ordered(arrivals: Sequence[Arrival], tasks: Sequence[Task], budget: int) -> Iterator[tuple[Arrival, Piece]]:
    for arrival in sorted(arrivals, key=lambda arrival: arrival.index):
        if tasks[arrival.index].trained:
            for piece in pieces(tasks[arrival.index], budget):
                yield arrival, piece


def _round(pack: Sequence[Piece], setting: Setting, cost: TrainerCost, result: Training, now: float) -> float:
    seconds = round_seconds(pack, setting.ranks, cost)
    result.training += seconds
    result.rounds += 1
    return now + seconds


def _wait(result: Training, now: float, arrival: Arrival, until: float | None = None) -> float:
    """Until it is scored, or patience ends."""
    end = arrival.scored if until is None else min(arrival.scored, until)
    if end <= now:
        return now
    seen = arrival if end == arrival.scored else Arrival(arrival.index, min(arrival.answered, end), end)
    result.waits.append((now, seen, not result.waits and not result.rounds))
    return end


def _pairs(prompt: int, length: int) -> float:
    return length * (prompt + length / 2)
