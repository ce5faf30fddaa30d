"""What a run leaves on disk: `metrics.jsonl` and `spans.jsonl` (a line per period), `evals.jsonl`, `samples.jsonl`.

`saw` is called by the producer's thread for every group, the rest by the trainer's; a period's groups have all been
seen before it is finished.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rondo.errors import JournalError
from rondo.observe.idle import account
from rondo.observe.lane import Cut, Lane, Stretch, since
from rondo.observe.metrics import Tally
from rondo.observe.spans import SpanBook
from rondo.types import Group

OF_ONE = 4  # responses of one group that are kept, to read


class Recorder:
    def __init__(
        self,
        *,
        folder: Path,
        lane: Lane,
        spans: SpanBook,
        trainer_tally: Callable[[], Tally],
        counters: Callable[[], dict[str, float]],
        decode: Callable[[Sequence[int]], str],
        show: Callable[[dict[str, Any]], None],
        samples: int = OF_ONE,
        other_ranks: Callable[[], Mapping[int, list[Stretch]]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._lane = lane
        self._spans = spans
        self._trainer_tally = trainer_tally
        self._counters = counters
        self._decode = decode
        self._show = show
        self._clock = clock
        self._tally = Tally()
        self._samples = samples
        self._other_ranks = other_ranks
        self._kept: dict[int, Group] = {}  # the first groups of the period, in prompt order
        self.period = 0  # the one under way
        self.groups = self.tokens = 0  # of it, so far
        self._eval: tuple[int, float] | None = None  # of which version, and what

    def saw(self, group: Group, kept: bool) -> None:
        self._spans.saw(group, kept)
        tally, count = self._tally, len(group.rewards)
        tally.mean("reward_mean", sum(group.rewards), count)
        tally.mean("_reward_square", sum(reward * reward for reward in group.rewards), count)
        for name, values in group.reward_parts.items():
            applied = [value for value in values if not math.isnan(value)]  # NaN: the function did not apply
            tally.mean(f"reward/{name}", sum(applied), len(applied))
        lengths = [len(response.token_ids) for response in group.answer.responses]
        tally.mean("length_mean", sum(lengths), count)
        tally.maximum("length_max", max(lengths))
        tally.mean("cut_fraction", sum(not response.stopped for response in group.answer.responses), count)
        tally.add("tokens", sum(lengths))
        self.groups += kept
        self.tokens += sum(lengths)
        tally.add("prompt_tokens", len(group.prompt.token_ids))
        tally.add("groups", 1)
        if group.index * OF_ONE < self._samples:
            self._kept[group.index] = group

    def evaluated(self, version: int, reward: float) -> None:
        self._eval = (version, reward)
        self._append("evals.jsonl", {"version": version, "reward_mean": reward})
        if version == 0:
            self._show({"eval_reward": reward, "version": 0})

    def begin(self, period: int = 0) -> None:
        """Time starts to count here: what came before is no part of a period."""
        self.period = period
        self._lane.switch("bookkeeping")  # what the trainer's thread does when it is at none of the named things
        self._cut()

    def finish(self, period: int) -> None:
        seen, self._tally = self._tally.read(), Tally()
        self.period, self.groups, self.tokens = period + 1, 0, 0
        variance = max(0.0, seen.pop("_reward_square") - seen["reward_mean"] ** 2)
        spans = self._spans.close_period(period, self._cut())
        began = time.perf_counter()
        time_of = account(spans)
        line: dict[str, Any] = {"period": period, "version": period}
        line |= seen | {"reward_std": variance**0.5} | self._trainer_tally().read() | self._counters()
        line["seconds"] = time_of.seconds
        line["trainer_seconds"] = dict(time_of.trainer)
        line["engine_seconds"] = [dict(seconds) for seconds in time_of.engines.values()]
        line["overlap_seconds"] = time_of.overlap
        line["generation_seconds"] = time_of.generation
        line["first_group_seconds"] = time_of.first_group
        line["tail_seconds"] = time_of.tail
        line["backlog_seconds"] = time_of.backlog
        line["observe_seconds"] = self._spans.take_seconds() + time.perf_counter() - began
        if self._eval is not None and self._eval[0] == period + 1:
            line["eval_reward"] = self._eval[1]
        self._append("metrics.jsonl", line)
        self._write_samples()
        self._show(line)

    def _cut(self) -> dict[str, Cut]:
        """All lanes at one moment."""
        now = self._clock()
        own = self._lane.cut(now)
        others = {f"trainer-{rank}": since(own.start, stretches) for rank, stretches in self._other_ranks().items()}
        return {"trainer": own, **self._spans.cut(now), **others}

    def _write_samples(self) -> None:
        kept, self._kept = [self._kept[index] for index in sorted(self._kept)], {}
        chosen = [(group, number) for group in kept for number in range(min(OF_ONE, len(group.answer.responses)))]
        for group, number in chosen[: self._samples]:
            response = group.answer.responses[number]
            sample = {
                "period": group.period,
                "ordinal": group.prompt.ordinal,
                "sample": number,
                "prompt": group.prompt.text,
                "completion": self._decode(response.token_ids),
                "reward": group.rewards[number],
                "stopped": response.stopped,
            }
            self._append("samples.jsonl", sample)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


KEYS = {
    "metrics.jsonl": "period",
    "samples.jsonl": "period",
    "spans.jsonl": "period",
    "certificate.jsonl": "period",
    "evals.jsonl": "version",
}


def forget_from(folder: Path, period: int, names: Iterable[str] = tuple(KEYS)) -> None:
    """Drop the lines of periods that a resumed run will train again, so that every period has one line; and a last line
    that is torn."""
    for name in names:
        path, key = folder / name, KEYS[name]
        if path.exists():
            kept = [line for line in _whole_lines(path) if line[key] < period]
            aside = path.with_suffix(".partial")
            aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(aside, path)


def told_periods(folder: Path, name: str) -> set[int]:
    """Those that have a line in this file."""
    path = folder / name
    return {line[KEYS[name]] for line in _whole_lines(path)} if path.exists() else set()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """All but a last one that was being written when the process or the power went."""
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise JournalError(f"{path} is damaged in line {number}: restore or remove that line") from None
    return found
