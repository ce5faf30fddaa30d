"""The spans as a trace for Perfetto and chrome://tracing: the JSON array format, one process per lane.

Spans of one thread must nest there, so groups that an engine answers at the same time are laid out on as many threads
as they need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rondo.errors import UserError
from rondo.observe.spans import PeriodSpans, read_periods

INNER = {"prefill", "decode"}  # lie inside a request
SPREAD = {"request", "reward", "line", "ready", "bucket"}  # may overlap others of their kind


def write_trace(folder: Path, path: Path) -> int:
    """Returns how many events were written."""
    events = list(trace_events(list(read_periods(folder))))
    if not events:
        raise UserError(f"{folder} has no spans: give the folder of a run that has finished a period (runs/NAME)")
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    return len(events)


def trace_events(periods: Sequence[PeriodSpans]) -> Iterator[dict[str, Any]]:
    if not periods:
        return
    origin = periods[0].start
    names: dict[str, int] = {}  # processes: a lane each
    rows: dict[tuple[str, str], list[int]] = {}  # when each thread of a lane's kind is free again
    for period in periods:
        base = _micros(period.start - origin)
        yield _event("period", 0, 0, base, base + _micros(period.seconds), {"period": period.period})
        requests: dict[int, int] = {}
        for span in sorted(period.spans(), key=lambda span: (span.start, span.kind in INNER)):
            process = names.setdefault(span.lane, len(names) + 1)
            start, end = base + _micros(span.start), base + _micros(span.end)
            if span.kind in SPREAD:
                thread = _row(rows.setdefault((span.lane, span.kind), []), start, end)
                thread += {"request": 10, "bucket": 5, "reward": 1, "line": 1, "ready": 10_001}[span.kind]
                if span.kind == "request":
                    requests[span.about["group"]] = thread
            elif span.kind in INNER:
                thread = requests[span.about["group"]]
            else:
                thread = 1 if span.kind in ("forward", "backward") else 0
            yield _event(span.kind, process, thread, start, end, {"period": period.period, **span.about})
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "periods"}}
    for name, process in names.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _micros(seconds: float) -> int:
    """Whole ones: what lies inside something else must not stick out by a rounding."""
    return round(seconds * 1e6)


def _event(kind: str, process: int, thread: int, start: int, end: int, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": kind,
        "cat": "rondo",
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": max(0, end - start),
        "args": about,
    }


def _row(free: list[int], start: int, end: int) -> int:
    """The first thread that is free at `start`; it is taken until `end`."""
    for number, until in enumerate(free):
        if until <= start:
            free[number] = end
            return number
    free.append(end)
    return len(free) - 1
