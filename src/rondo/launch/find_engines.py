"""Finds a run's engines, and fills the pool with them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import aiohttp
from transformers import AutoConfig

from rondo.config import Config, asset_or_path
from rondo.engines.client import HttpEngine
from rondo.engines.pool import EnginePool
from rondo.engines.protocol import SHAPE
from rondo.errors import AddressError, EngineError
from rondo.stream.queue import GroupQueue


async def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def join_engines(
    pool: EnginePool,
    session: aiohttp.ClientSession,
    queue: GroupQueue,
    config: Config,
    folder: Path,
    *,
    warn: Callable[[str], None],
) -> int:
    """Fill the pool; returns the longest context that every engine can serve."""
    shape = _shape(config)
    for url in await _addresses(queue, config, folder):
        engine = HttpEngine(url, session, seconds=config.engines.request_seconds)
        try:
            await pool.add(engine)
        except EngineError as error:
            raise AddressError(f"engines.urls: {url} is no engine that Rondo can drive: {error}") from None
        state = pool.seats[-1].state
        if state.note:
            warn(state.note)
        check_shape(url, state.shape, shape, config.model.path)
    return min(seat.state.max_model_len for seat in pool.seats)


def _shape(config: Config) -> dict[str, int]:
    text = AutoConfig.from_pretrained(asset_or_path(config.model.path)).get_text_config()
    return {name: getattr(text, name, 0) for name in SHAPE}


def check_shape(url: str, held: Mapping[str, int], wanted: Mapping[str, int], model: str) -> None:
    """An engine that serves another model would refuse the first weights; this says it sooner, and why."""
    for name, value in held.items():
        if value and wanted.get(name) and value != wanted[name]:
            raise AddressError(
                f"engine {url} serves another model: its {name} is {value}, but model.path = {model} has {wanted[name]}"
            )


async def _addresses(queue: GroupQueue, config: Config, folder: Path) -> Sequence[str]:
    """Given ones as they are; started ones as they announce themselves (the launcher watches that they live)."""
    if config.engines.urls:
        return config.engines.urls
    paths = [folder / "engines" / f"engine-{number}.json" for number in range(config.engines.count)]
    deadline = time.monotonic() + config.engines.start_seconds
    while missing := [path.stem for path in paths if not path.exists()]:
        queue.raise_if_over()
        if time.monotonic() > deadline:
            raise EngineError(
                f"{', '.join(missing)} not ready after engines.start_seconds = {config.engines.start_seconds:g}: "
                f"see {folder / 'logs'}"
            )
        await asyncio.sleep(0.05)
    return [json.loads(path.read_text())["url"] for path in paths]
