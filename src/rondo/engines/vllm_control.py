"""Driving a vLLM server: what its own API lacks goes through Rondo's worker extension, by `/collective_rpc`.

Works on vLLM 0.24 as on 0.32: their weight-transfer calls differ, `/collective_rpc` does not.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from rondo.engines.http import Caller, RefusedError
from rondo.engines.protocol import EngineState
from rondo.engines.vllm import OLDEST, TESTED
from rondo.engines.vllm_tokens import PATH
from rondo.errors import EngineError
from rondo.types import Confirmation

BROKEN_VERSION = -2  # as the worker extension says it
AS_SHOWN = "start it as `rondo serve --backend vllm --print` shows"


class VllmControl:
    """One server's workers. `state` is what they last said; `settled` asks them again."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.state: EngineState | None = None
        self._reading: asyncio.Task[EngineState] | None = None
        self._next: asyncio.Task[EngineState] | None = None

    async def join(self, version: str) -> EngineState:
        """The first look at a server that calls itself vLLM `version`."""
        number = parse_version(version)
        if number < OLDEST:
            raise EngineError(f"engine {self._caller.url} is vLLM {version}: Rondo needs {_dotted(OLDEST)} or newer")
        try:
            state = await self.read()
        except RefusedError as error:
            if error.status == 404:
                lacks = "was started without VLLM_SERVER_DEV_MODE=1"
            else:
                lacks = f"was started without Rondo's worker extension ({error.reason})"
            raise EngineError(f"vLLM at {self._caller.url} {lacks}: {AS_SHOWN}") from None
        try:
            await self._caller.get(PATH)
        except RefusedError:
            raise EngineError(
                f"vLLM at {self._caller.url} was started without Rondo's middleware: {AS_SHOWN}"
            ) from None
        if number not in TESTED:
            tested = " and ".join(map(_dotted, TESTED))
            note = f"engine {self._caller.url} is vLLM {version}; Rondo is tested with {tested}"
            state = self.state = replace(state, note=note)
        return state

    async def read(self) -> EngineState:
        results = await self._workers("rondo_state")
        first = results[0]
        if first.get("logprobs_mode") != "processed_logprobs":
            raise EngineError(
                f"vLLM at {self._caller.url} was started with --logprobs-mode {first.get('logprobs_mode')}, which is "
                f"not the distribution it samples from: {AS_SHOWN}"
            )
        versions = {result["version"] for result in results}
        self.state = EngineState(
            boot="-".join(result["boot"] for result in results),
            version=versions.pop() if len(versions) == 1 else BROKEN_VERSION,
            slots=first["slots"],
            max_model_len=first["max_model_len"],
            shape=first["shape"],
        )
        return self.state

    async def settled(self) -> EngineState:
        """A state that was asked for after this call began; those who wait at the same time share one question."""
        if self._reading is None or self._reading.done():
            self._reading = _shared(self.read())
            return await asyncio.shield(self._reading)
        if self._next is None or self._next.done():
            self._next = _shared(self._after(self._reading))
        return await asyncio.shield(self._next)

    async def _after(self, current: asyncio.Task[EngineState]) -> EngineState:
        await asyncio.wait([current])
        self._reading, self._next = self._next, None
        return await self.read()

    async def start_update(self) -> None:
        if not (await self._caller.get("/is_paused"))["is_paused"]:
            raise EngineError(f"engine {self._caller.url} is not paused: weights may change only when it is")
        await self._workers("rondo_start")

    async def update(self, info: Mapping[str, Any]) -> None:
        await self._workers("rondo_update", json.dumps(dict(info)))

    async def finish_update(self) -> Confirmation:
        try:
            results = await self._workers("rondo_finish")
        finally:
            state = await self.read()
        held = {(result["version"], result["checksum"]) for result in results}
        if len(held) != 1:
            raise EngineError(f"the workers of engine {self._caller.url} hold different weights: {sorted(held)}")
        version, checksum = held.pop()
        return Confirmation(engine=self._caller.url, boot=state.boot, version=int(version), checksum=checksum)

    async def _workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """What every worker answered; the first complaint is raised."""
        body = await self._caller.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results = body.get("results")
        if not results or not all(isinstance(result, dict) for result in results):
            raise EngineError(f"vLLM at {self._caller.url} has no workers that know {method}: {AS_SHOWN}")
        for result in results:
            if "error" in result:
                raise EngineError(f"engine {self._caller.url} refused {method}: {result['error']}")
        return list(results)


def _shared(question: Coroutine[Any, Any, EngineState]) -> asyncio.Task[EngineState]:
    """A task whose failure is no news when all who waited for it are gone."""
    task = asyncio.ensure_future(question)
    task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
    return task


def parse_version(text: str) -> tuple[int, ...]:
    """0.24.0rc1+cpu as (0, 24, 0)."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(number or 0) for number in found.groups()) if found else (0, 0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
