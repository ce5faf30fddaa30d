"""What a run's folder holds, as the page wants it: a tree of plain values, small enough to travel in one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rondo.errors import UserError
from rondo.observe.idle import ENGINE_STATES, TRAINER_STATES
from rondo.observe.spans import GROUP_COLUMNS, MOMENTS, PeriodSpans, Span, read_periods
from rondo.observe.verdict import judge, mean_period

TICKS = 10_000  # per second: times travel as whole numbers
MOST_BARS = 40_000  # of all timelines together: about 2 MB
MOST_SAMPLES = 2_000
LONGEST_TEXT = 4_000  # characters of a sample


def gather(folder: Path, *, against: Path | None = None, live: bool = False) -> dict[str, Any]:
    """Everything the page shows of a run and, beside it, of another one."""
    runs = [_run(folder, live=live)]
    if against is not None:
        runs.append(_run(against, live=False))
    return {
        "live": live,
        "ticks": TICKS,
        "columns": list(GROUP_COLUMNS),
        "states": {"trainer": list(TRAINER_STATES), "engine": list(ENGINE_STATES)},
        "runs": runs,
        "comparison": _comparison(runs),
    }


def _run(folder: Path, *, live: bool) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} holds no run: give the folder that `rondo train` wrote (runs/NAME)")
    metrics = read_jsonl(folder / "metrics.jsonl")
    if not metrics and not live:
        raise UserError(f"{folder} has no finished period to report yet: wait for one, or give --live")
    config = json.loads((folder / "config.json").read_text())
    mean = mean_period(
        metrics, ranks=config["trainer"]["ranks"], synchronous=config["schedule"]["mode"] == "synchronous"
    )
    return {
        "name": config["run"]["name"],
        "folder": folder.resolve().name,
        "path": str(folder),
        "mode": config["schedule"]["mode"],
        "periods": config["schedule"]["periods"],
        "config": config,
        "metrics": metrics,
        "evals": read_jsonl(folder / "evals.jsonl"),
        "verdict": asdict(judge(mean)) if mean else None,
        "samples": [_sample(sample) for sample in read_jsonl(folder / "samples.jsonl")[-MOST_SAMPLES:]],
        "certificate": _certificate(folder),
        "timelines": _timelines(folder),
    }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Its lines; none where there is no file. A torn last line is left out: the run may be writing it."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    cut = {name: _shortened(str(sample.get(name, ""))) for name in ("prompt", "completion")}
    return {**sample, **cut}


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + f" ... ({len(text)} characters)"


def _certificate(folder: Path) -> dict[str, Any]:
    path = folder / "certificate.json"
    return {
        "periods": read_jsonl(folder / "certificate.jsonl"),
        "verified": json.loads(path.read_text()) if path.exists() else None,
    }


def _comparison(runs: Sequence[Mapping[str, Any]]) -> str:
    """Two runs side by side in a sentence."""
    if len(runs) < 2 or not all(run["verdict"] for run in runs):
        return ""
    one, other = runs
    mine, theirs = one["verdict"]["seconds"], other["verdict"]["seconds"]
    names = [run["mode"] if one["mode"] != other["mode"] else run["folder"] for run in runs]
    times, word = (theirs / mine, "fast") if mine <= theirs else (mine / theirs, "slow")
    seconds = f"{mine:.2f} s against {theirs:.2f} s a period"
    return f"{_capital(names[0])} is {times:.2f} times as {word} as {names[1]}: {seconds}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _timelines(folder: Path) -> list[dict[str, Any]]:
    """Of all periods, or of as many as fit, evenly spread and always with the first and the last."""
    sizes = [len(period.groups) + len(period.micro_steps()) for period in read_periods(folder)]
    wanted = set(spread(sizes, MOST_BARS))
    return [timeline(period) for number, period in enumerate(read_periods(folder)) if number in wanted]


def spread(sizes: Sequence[int], budget: int) -> list[int]:
    """Places to keep so that their sizes fit the budget."""
    count = len(sizes)
    while count > 2:
        chosen = sorted({round(number * (len(sizes) - 1) / (count - 1)) for number in range(count)})
        if sum(sizes[number] for number in chosen) <= budget:
            return chosen
        count = count * 3 // 4
    return sorted({0, len(sizes) - 1}) if sizes else []


def timeline(period: PeriodSpans) -> dict[str, Any]:
    engines = list(period.engines)
    return {
        "period": period.period,
        "seconds": period.seconds,
        "engines": [
            {"name": name, "url": period.engines[name], "away": _away(period.lanes.get(name, ()))} for name in engines
        ],
        "lanes": {
            name: _thinned(lane, period.seconds) for name, lane in period.lanes.items() if name not in period.engines
        },
        "buckets": [[_ticks(mark.start), _ticks(mark.end)] for mark in period.marks if mark.kind == "bucket"],
        "groups": [[_cell(name, group[name], engines) for name in GROUP_COLUMNS] for group in period.groups],
    }


def _thinned(lane: Iterable[Span], seconds: float) -> list[list[Any]]:
    """States that can be seen: what is shorter than a two-thousandth of the period is left out."""
    return [
        [span.kind, _ticks(span.start), _ticks(span.end), *span.about.values()]
        for span in lane
        if span.kind == "training" or span.seconds * 2000 >= seconds
    ]


def _away(lane: Iterable[Span]) -> list[list[int]]:
    """When an engine was lost, or not here yet."""
    return [[_ticks(span.start), _ticks(span.end)] for span in lane if span.kind not in ("generating", "idle")]


def _cell(name: str, value: Any, engines: Sequence[str]) -> Any:
    if name == "engine":
        return engines.index(value) if value in engines else -1
    if name in MOMENTS:
        return None if value is None else _ticks(value)
    return round(value, 4) if isinstance(value, float) else value


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)
