"""`rondo serve`: the embedded engine behind HTTP, in the subset of vLLM's API that Rondo uses.

Three pieces run at the same time:
- the event loop (the main thread) consumes HTTP calls and produces their answers; a handler waits on a future
  that the engine's thread resolves, or is cancelled when its client leaves.
- the engine's thread (worker.py) consumes commands from a queue and produces results; it waits for commands
  when the engine is idle, and whoever puts one wakes it.
- `_until_told` waits for SIGTERM, SIGINT or the death of the engine's thread, then ends the process: 0 when
  told to, DiedError when the thread died. In between /health answers 500 with the reason.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from aiohttp.typedefs import Middleware
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rondo.engines.bearer import NEEDED, OPEN_PATH, allowed, check_host
from rondo.engines.dialect import (
    Call,
    Refusal,
    Served,
    Tokenizer,
    completion,
    error_body,
    integer,
    parse_call,
    parse_object,
)
from rondo.engines.embedded import EmbeddedEngine
from rondo.engines.guest import Guest
from rondo.engines.process import announce as tell
from rondo.engines.process import printable_host
from rondo.engines.protocol import SHAPE
from rondo.engines.servable import load_model
from rondo.engines.worker import EngineWorker
from rondo.errors import AddressError, ConfigError, DiedError, EngineError, PublicationError, RondoError
from rondo.weights.safe import UnreadableWeightsError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LARGEST_BODY = 64 << 20
_LAST_WORDS_SECONDS = 1.0  # how long a server whose engine died still says so


class Endpoints:
    """One method per call of the dialect."""

    def __init__(self, worker: EngineWorker, served: Served) -> None:
        self._worker = worker
        self._served = served
        self._prefix_resets = 0

    def application(self, token: str = "") -> web.Application:
        application = web.Application(
            client_max_size=_LARGEST_BODY, middlewares=[_errors_as_sentences, require_token(token)]
        )
        application.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/rondo/state", self.state),
                web.post("/v1/completions", self.completions),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/start_weight_update", self.start_weight_update),
                web.post("/update_weights", self.update_weights),
                web.post("/finish_weight_update", self.finish_weight_update),
            ]
        )
        return application

    async def health(self, _: web.Request) -> web.Response:
        if self._worker.died.done():
            raise DiedError(self._worker.died.result())
        return web.json_response({"status": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._served.model,
            "object": "model",
            "created": 0,
            "owned_by": "rondo",
            "max_model_len": self._served.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def state(self, _: web.Request) -> web.Response:
        engine = self._worker.engine
        return web.json_response(
            {
                "boot": self._served.boot,
                "version": engine.version,
                "model": self._served.model,
                "slots": engine.slots.count,
                "running": engine.running,
                "waiting": engine.waiting,
                "max_model_len": engine.max_model_len,
                "shape": {name: getattr(engine.model.config.get_text_config(), name, 0) for name in SHAPE},
                "batch_invariant": engine.batch_invariant,
                "paused": engine.paused,
                "busy_seconds": engine.busy_seconds,
                "tokens": engine.tokens,
                "prefix_resets": self._prefix_resets,
                "monotonic": time.monotonic(),
            }
        )

    async def completions(self, http: web.Request) -> web.Response:
        call = parse_call(await http.read(), self._served)
        result = await self._worker.generate(call.request)
        prompt_logps = None
        if call.prompt_logprobs:
            prompt_logps = await self._worker.call(functools.partial(self._prompt_logps, call, result.version))
        return web.json_response(completion(call, result, self._served, prompt_logps))

    def _prompt_logps(self, call: Call, version: tuple[int, int]) -> list[float]:
        """In the engine's thread."""
        engine = self._worker.engine
        if version != (engine.version, engine.version):
            raise Refusal("the weights changed meanwhile: ask again", status=409)
        return engine.prompt_logps(call.request.prompt)

    async def pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")  # vLLM's default
        if mode not in ("wait", "abort"):
            raise Refusal(f"mode = {mode} is not served: use wait or abort")
        if not await self._worker.pause(abort=mode == "abort"):
            raise Refusal("resumed before the running requests had finished", status=409)
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self._worker.call(self._worker.resume)
        return web.json_response({"status": "resumed"})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        # No prompt outlives its request here, so there is nothing to drop.
        self._prefix_resets += 1
        return web.json_response({"status": "ok"})

    async def start_weight_update(self, _: web.Request) -> web.Response:
        await self._worker.call(self._worker.updates.start)
        return web.json_response({"status": "started"})

    async def update_weights(self, http: web.Request) -> web.Response:
        info = parse_object(await http.read()).get("update_info")
        if not isinstance(info, dict):
            raise Refusal("update_info is missing: send version with a transport or a checksum in it")
        if "version" not in info or not isinstance(info.get("checksum", ""), str):
            raise Refusal("update_info must hold version (an integer), and transport or checksum (strings)")
        version = integer(info, "version", 0, low=0)
        await self._worker.call(functools.partial(self._worker.updates.update, info, version=version))
        return web.json_response({"status": "loaded"})

    async def finish_weight_update(self, _: web.Request) -> web.Response:
        try:
            checksum = await self._worker.call(self._worker.updates.finish)
        except PublicationError:
            await self._worker.call(self._worker.refuse_waiting)
            raise
        version = self._worker.engine.version
        return web.json_response({"boot": self._served.boot, "version": version, "checksum": checksum})


def require_token(token: str) -> Middleware:
    """Nothing but a sign of life is answered to who does not show the token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.getall("Authorization", [])
        if request.path != OPEN_PATH and not allowed(shown[0] if len(shown) == 1 else None, token):
            raise Refusal(NEEDED, status=401)
        return await handler(request)

    return check


@web.middleware
async def _errors_as_sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RondoError as error:
        status = _status(error)
        return web.json_response(error_body(error, status), status=status)


def _status(error: RondoError) -> int:
    match error:
        case Refusal():
            return error.status
        case UnreadableWeightsError():
            return 400
        case PublicationError() | EngineError():
            return 409
        case _:
            return 500


def serve(
    *,
    model: str,
    host: str = "127.0.0.1",
    port: int = 0,
    slots: int = 64,
    max_model_len: int = 0,
    batch_invariant: bool = False,
    dtype: str = "float32",
    threads: int = 0,
    device: str = "auto",
    announce: Path | None = None,
    token: str = "",
    guest: Guest | None = None,
) -> None:
    """Serve a model until told to stop. `announce` is written once calls are answered; a guest joins a run then."""
    check_host(host, token)
    if slots < 1:
        raise ConfigError(f"slots = {slots} must be 1 or more")
    # The port comes first: one that is taken should not cost the loading of a model.
    with _listen(host, port) as listener:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        loaded = load_model(model, dtype=dtype, device=_device(device))
        engine = EmbeddedEngine(loaded, slots=slots, max_model_len=max_model_len, batch_invariant=batch_invariant)
        url = f"http://{printable_host(host)}:{listener.getsockname()[1]}"
        served = describe(engine, model)

        def ready() -> None:
            if announce is not None:
                tell(announce, url=url, boot=served.boot)
            sys.stdout.write(f"serving {model} at {url} ({slots} slots)\n")
            sys.stdout.flush()
            if guest is not None:
                guest.arrive(host, listener.getsockname()[1])

        leave = guest.leave if guest is not None else lambda: None
        asyncio.run(serve_engine(engine, served, listener, ready, token=token, leave=leave))


async def serve_engine(
    engine: EmbeddedEngine,
    served: Served,
    listener: socket.socket,
    ready: Callable[[], None],
    *,
    token: str = "",
    leave: Callable[[], None] = lambda: None,
) -> None:
    """Answer calls on `listener` until a signal comes; a death of the engine's thread is raised."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    worker = EngineWorker(engine, loop)
    runner = web.AppRunner(
        Endpoints(worker, served).application(token),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=0.2,
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    worker.start()
    ready()
    try:
        await _until_told(told, worker)
        await asyncio.to_thread(leave)  # the run lets its requests finish here, or sends them elsewhere
    finally:
        await runner.cleanup()
        worker.stop(seconds=5.0)


async def _until_told(told: asyncio.Event, worker: EngineWorker) -> None:
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(told.wait()), worker.died]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    ends[0].cancel()
    if worker.died.done():
        await asyncio.sleep(_LAST_WORDS_SECONDS)
        raise DiedError(worker.died.result())


def describe(engine: EmbeddedEngine, model: str) -> Served:
    return Served(
        model=model,
        boot=secrets.token_hex(8),
        vocabulary=engine.model.get_input_embeddings().num_embeddings,
        max_model_len=engine.max_model_len,
        eos=_eos(engine.model),
        tokenizer=functools.cache(functools.partial(_tokenizer, model)),
    )


def _eos(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for config in (model.config, model.generation_config):
        value = getattr(config, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)


def _tokenizer(model: str) -> Tokenizer | None:
    files = ("tokenizer.json", "tokenizer_config.json")
    if Path(model).is_dir() and not any((Path(model) / name).is_file() for name in files):
        return None  # transformers would make up an empty one
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):  # served by token ids alone
        return None
    return tokenizer


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): choose another port, or 0 for any free one"
        ) from error


def _device(name: str) -> str:
    if name != "auto":
        return name
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type
