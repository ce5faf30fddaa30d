"""Builds a run's publisher: which way the weights go, and what is probed after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rondo.config import Config
from rondo.engines.bearer import is_loopback
from rondo.engines.pool import EnginePool
from rondo.errors import ConfigError, PublicationError
from rondo.launch.addresses import is_here, seen_from
from rondo.observe.lane import Lane
from rondo.rollout.background import Background
from rondo.trainer.ensemble import AnyTrainer, Ensemble
from rondo.weights.broadcast import BroadcastTransport
from rondo.weights.folder import publication_folder
from rondo.weights.http import WeightServer
from rondo.weights.ipc import IpcTransport
from rondo.weights.probe import RANGES, Probe
from rondo.weights.publisher import Publisher
from rondo.weights.shelf import Address, Shelf
from rondo.weights.store import Store
from rondo.weights.stored import StoredTransport
from rondo.weights.transport import Transport

PROBE_TOKENS = 64


def build_publisher(
    config: Config,
    folder: Path,
    *,
    pool: EnginePool,
    trainer: AnyTrainer,
    device: torch.device,
    background: Background,
    probe_text: Sequence[int],
    warn: Callable[[str], None],
    lane: Lane,
) -> tuple[Publisher, Probe]:
    dtype = getattr(torch, config.model.dtype)
    longest = min(seat.state.max_model_len for seat in pool.seats) - 1  # an engine adds a token to what it scores
    probe = Probe(
        token_ids=[*probe_text, *probe_text][: min(PROBE_TOKENS, longest)],
        score=trainer.score,
        submit=background.submit,
        allowed=config.weights.probe_gap or max(RANGES[config.model.dtype], RANGES[config.trainer.dtype]),
    )
    transport = _transport(config, folder, pool, device, background)
    publisher = Publisher(
        transport=transport,
        weights=trainer.weights,
        dtype=dtype,
        bucket_bytes=config.weights.bucket_mb << 20,
        receivers=pool.receivers,
        submit=background.submit,
        probe=probe,
        probe_one=probe.one,
        shelf=_shelf(config, folder, transport),
        apart=not isinstance(trainer, Ensemble),
        on_held=lambda member, confirmation: pool.confirm(member.seat, confirmation),
        on_failed=lambda member, reason: pool.lose(member.seat, reason),
        health_seconds=config.engines.health_seconds,
        on_repeat=warn,
        lane=lane,
    )
    return publisher, probe


def _transport(
    config: Config, folder: Path, pool: EnginePool, device: torch.device, background: Background
) -> Transport:
    weights, dtype = config.weights, getattr(torch, config.model.dtype)
    name: str = weights.transport
    host = weights.host or seen_from([seat.engine.url for seat in pool.seats])
    if name == "auto":
        name = choose([seat.engine.url for seat in pool.seats], config, device)
    if name in ("ipc", "nccl") and config.engines.backend == "embedded":
        raise ConfigError(
            f'weights.transport = "{name}" needs engines.backend = "vllm": the embedded engine takes files and http'
        )
    if name == "ipc":
        return IpcTransport(dtype=dtype, device=device)
    if name == "nccl":
        return BroadcastTransport(dtype=dtype, device=device, host=host, workers=config.engines.tensor_parallel)
    if name == "files":
        shared = publication_folder(weights.folder, folder)
        local = publication_folder("", folder) if weights.delta else shared
        outbox = None if local == shared else shared
        return StoredTransport(name=name, store=Store(local, dtype), outbox=outbox, delta=weights.delta)
    store = Store(publication_folder("", folder), dtype)
    server = WeightServer(store.folder, host=host)
    background.call(server.start())
    return StoredTransport(
        name=name,
        store=store,
        delta=weights.delta,
        address=server.url,
        on_close=lambda: background.call(server.close()),
    )


def _shelf(config: Config, folder: Path, transport: Transport) -> Shelf | None:
    """Where the last publication is kept for engines that come between two."""
    servers: list[WeightServer] = []

    if isinstance(transport, StoredTransport):
        store, written = transport.store, True
    elif config.weights.keep:
        store, written = Store(publication_folder("", folder), getattr(torch, config.model.dtype)), False
    else:
        return None
    shared = bool(config.weights.folder) and config.weights.transport == "files" and not config.weights.delta

    async def elsewhere(url: str) -> Address | None:
        if is_here(url) or shared:
            return None
        if is_loopback(config.weights.host):
            raise PublicationError(
                f"engine {url} is on another machine, which cannot fetch weights from weights.host = "
                f"{config.weights.host}: set that to this machine's address as engines see it"
            )
        if not servers:
            server = WeightServer(store.folder, host=config.weights.host or seen_from([url]))
            await server.start()
            servers.append(server)
        return servers[0].url

    async def close() -> None:
        for server in servers:
            await server.close()

    return Shelf(store, written=written, keep=config.weights.delta, elsewhere=elsewhere, on_close=close)


def choose(urls: Sequence[str], config: Config, device: torch.device) -> str:
    """What `auto` means."""
    if not all(is_here(url) for url in urls):
        return "http"
    # Ray shows a process its own devices only: another's memory cannot be opened there.
    started = not config.engines.urls and config.launch.backend == "local"
    on_accelerators = device.type != "cpu" and config.engines.device != "cpu"
    return "ipc" if config.engines.backend == "vllm" and started and on_accelerators else "files"
