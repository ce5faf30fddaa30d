"""An engine over HTTP: one client for the embedded engine and for vLLM.

Which of the two a server is, the first call finds out. They speak the same completions; the embedded engine's answers
carry boot and version themselves, vLLM's get them from its workers: as known before the request was sent, and as read
after the answer came (decision 0010).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rondo.engines.http import Caller, NonsenseError, RefusedError, RestartedError
from rondo.engines.protocol import EngineState
from rondo.engines.vllm_control import BROKEN_VERSION, VllmControl
from rondo.engines.vllm_tokens import FIELDS, PATH
from rondo.errors import EngineError
from rondo.observe.clock import Offset
from rondo.types import Answer, Confirmation, Moments, Response, Sampling


class HttpEngine:
    def __init__(self, url: str, session: aiohttp.ClientSession, *, seconds: float, token: str = "") -> None:
        self._caller = Caller(url, session, seconds=seconds, token=token)
        self.url = self._caller.url
        self._vllm: VllmControl | None = None
        self._known = False  # which of the two it is
        self._updating = asyncio.Lock()
        self._clock = Offset()

    async def health(self) -> None:
        await self._caller.get("/health")

    async def state(self) -> EngineState:
        if not self._known:
            return await self._meet()
        if self._vllm is not None:
            return await self._vllm.read()
        return self._state_of(await self._caller.get("/rondo/state"))

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling) -> Answer:
        if not self._known:
            await self._meet()
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "n": n,
            "seed": seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        sent = time.monotonic()
        answer = await (self._completion(body) if self._vllm is None else self._vouched(self._vllm, body))
        try:
            return self._answer(answer, n=n, sampling=sampling, sent=sent)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
            raise NonsenseError(f"engine {self.url} answered nonsense: {error!r}", answer=answer) from error

    async def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1) of each token but the first, given those before it. Waits while paused."""
        if not self._known:
            await self._meet()
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "seed": 0, "prompt_logprobs": 0}
        answer = await self._completion(body | {"return_token_ids": True})
        try:
            given = answer["choices"][0]["prompt_logprobs"][1:]
            logps = [float(place[str(token)]["logprob"]) for token, place in zip(token_ids[1:], given, strict=True)]
        except (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError) as error:
            raise NonsenseError(f"engine {self.url} answered nonsense: {error!r}", answer=answer) from error
        return logps

    async def pause(self) -> None:
        await self._caller.post("/pause?mode=wait")

    async def start_update(self) -> None:
        if not self._known:
            await self._meet()
        if self._vllm is not None:
            await self._vllm.start_update()
        else:
            await self._caller.post("/start_weight_update", {})

    async def update(self, info: Mapping[str, Any]) -> None:
        # One after the other, as they were given: two connections could overtake each other.
        async with self._updating:
            if self._vllm is not None:
                await self._vllm.update(info)
            else:
                await self._caller.post("/update_weights", {"update_info": dict(info)})

    async def finish_update(self) -> Confirmation:
        if self._vllm is not None:
            return await self._vllm.finish_update()
        body = await self._caller.post("/finish_weight_update", {})
        try:
            boot, version, checksum = str(body["boot"]), int(body["version"]), str(body["checksum"])
        except (KeyError, TypeError, ValueError) as error:
            raise NonsenseError(f"engine {self.url} confirmed nonsense: {error!r}", answer=body) from error
        return Confirmation(engine=self.url, boot=boot, version=version, checksum=checksum)

    async def reset_prefix_cache(self) -> None:
        if (await self._caller.post("/reset_prefix_cache")).get("success") is False:
            raise EngineError(f"engine {self.url} could not drop its cached prefixes: something still runs there")

    async def resume(self) -> None:
        if self._vllm is not None and (await self._vllm.read()).version == BROKEN_VERSION:
            raise EngineError(f"engine {self.url} {_BROKEN}")
        await self._caller.post("/resume")
        if self._vllm is None and self._clock.stale:
            await self._clock.measure(self._their_time)

    async def _their_time(self) -> float:
        return float((await self._caller.get("/rondo/state")).get("monotonic", 0.0))

    async def _meet(self) -> EngineState:
        """Find out whom we talk to, with all that a first look can find fault with."""
        try:
            state = self._state_of(await self._caller.get("/rondo/state"))
        except RefusedError as error:
            if error.status == 401:
                raise EngineError(
                    f"engine {self.url} demands another token than this run's: start both with the same RONDO_TOKEN, "
                    "or let it join with `rondo join --engine-token-file`"
                ) from None
            if error.status not in (404, 405):
                raise
            control = VllmControl(self._caller)
            state = await control.join(await self._vllm_version())
            self._vllm = control
        self._known = True
        return state

    async def _vllm_version(self) -> str:
        try:
            return str((await self._caller.get("/version"))["version"])
        except (RefusedError, KeyError):
            raise EngineError(f"the server at {self.url} is neither a Rondo engine nor vLLM") from None

    def _state_of(self, body: dict[str, Any]) -> EngineState:
        try:
            wanted = {name: body[name] for name in ("boot", "version", "slots", "max_model_len")}
        except KeyError:
            raise EngineError(f"the server at {self.url} is neither a Rondo engine nor vLLM") from None
        return EngineState(**wanted, shape=body.get("shape", {}))

    async def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        # No text is wanted: neither decoded nor, where it cannot be left out, with decoded token names.
        own = {"detokenize": False} if self._vllm is None else {"return_tokens_as_token_ids": True}
        return await self._caller.post("/v1/completions", body | own)

    async def _vouched(self, vllm: VllmControl, body: dict[str, Any]) -> dict[str, Any]:
        """vLLM's answer with the boot and version that its workers held before and after."""
        before = vllm.state or await vllm.read()
        if before.version == BROKEN_VERSION:
            raise EngineError(f"engine {self.url} {_BROKEN}")
        answer = await self._caller.post(PATH, {name: body[name] for name in ("prompt", *FIELDS) if name in body})
        after = await vllm.settled()
        if after.boot != before.boot:
            raise RestartedError(f"engine {self.url} was restarted while it answered: its responses are void")
        return answer | {"rondo": {"boot": after.boot, "version": [before.version, after.version]}}

    def _answer(self, body: dict[str, Any], *, n: int, sampling: Sampling, sent: float) -> Answer:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise ValueError(f"{n} samples were asked for, {len(choices)} came")
        start, end = body["rondo"]["version"]
        return Answer(
            engine=self.url,
            boot=body["rondo"]["boot"],
            version=(int(start), int(end)),
            responses=tuple(_response(choice, sampling) for choice in choices),
            moments=Moments(sent=sent, engine=self._moments(body["rondo"].get("moments"), sent)),
        )

    def _moments(self, told: Sequence[float] | None, sent: float) -> tuple[float | None, float | None, float | None]:
        """The engine's own, on our clock; kept inside what we saw ourselves, for a measured offset has an error."""
        if told is None:
            return None, None, None
        arrived = time.monotonic()
        admitted, first, finished = (min(arrived, max(sent, self._clock.ours(float(moment)))) for moment in told)
        return admitted, first, finished


_BROKEN = "holds a failed weight update: no answers until a good one is finished"


def _response(choice: dict[str, Any], sampling: Sampling) -> Response:
    token_ids = tuple(int(token) for token in choice["token_ids"])
    logps = tuple(float(logp) for logp in choice["logprobs"]["token_logprobs"])
    if not 0 < len(token_ids) <= sampling.max_tokens or len(logps) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(logps)} log-probs of at most {sampling.max_tokens}")
    if not all(math.isfinite(logp) and logp <= 1e-6 for logp in logps):
        raise ValueError("a log-prob that is not a number below 0")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}")
    return Response(token_ids=token_ids, logps=logps, stopped=choice["finish_reason"] == "stop")
