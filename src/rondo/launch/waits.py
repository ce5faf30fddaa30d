"""Registers the waits that nobody registers himself: every HTTP request of a session; and what the trainer is at."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp

from rondo.engines.pool import EnginePool
from rondo.observe.diagnosis import Waits
from rondo.observe.lane import Lane


def watch_requests(session: aiohttp.ClientSession, waits: Waits) -> None:
    """By engine and call. A sign of life that is answered is no movement of the run."""

    async def begin(_: aiohttp.ClientSession, context: SimpleNamespace, request: Any) -> None:
        url = request.url
        context.number = waits.begin(f"an answer to {request.method} {url.path}", f"{url.scheme}://{url.authority}")
        context.moves = request.method != "GET"

    async def end(_: aiohttp.ClientSession, context: SimpleNamespace, request: Any) -> None:
        waits.end(context.number, moved=context.moves and not hasattr(request, "exception"))

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    trace.on_request_end.append(end)
    trace.on_request_exception.append(end)
    trace.freeze()
    session.trace_configs.append(trace)


def watch_trainer(lane: Lane, ranks: int, events: Callable[[], int], waits: Waits) -> None:
    """Every micro-batch, step and change of state is a movement."""
    others = "" if ranks == 1 else f", as rank 0 of {ranks}"
    waits.worker(lambda: f"the trainer is {lane.state}{others}", lambda: (lane.state, events()))


def watch_pool(pool: EnginePool, waits: Waits) -> None:
    """How many requests have no engine yet, and how many engines there are to take them."""

    def line() -> str:
        return (
            f"the pool has {len(pool.ready)} of {len(pool.seats)} engines ready, and {pool.waiting} requests that wait"
        )

    waits.worker(line, lambda: len(pool.ready))
