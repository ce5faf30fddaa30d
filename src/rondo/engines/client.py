"""An engine over HTTP: the dialect that the embedded engine and vLLM share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rondo.engines.protocol import EngineState
from rondo.errors import EngineError
from rondo.types import Answer, Confirmation, Response, Sampling


class HttpEngine:
    def __init__(self, url: str, session: aiohttp.ClientSession, *, seconds: float) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    async def state(self) -> EngineState:
        body = await self._call("GET", "/rondo/state")
        return EngineState(**{name: body[name] for name in ("boot", "version", "slots", "max_model_len")})

    async def generate(self, prompt: Sequence[int], *, n: int, seed: int, sampling: Sampling) -> Answer:
        body = await self._call(
            "POST",
            "/v1/completions",
            {
                "prompt": list(prompt),
                "n": n,
                "seed": seed,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 0,
                "return_token_ids": True,
                "detokenize": False,
            },
        )
        try:
            return self._answer(body, n=n, sampling=sampling)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineError(f"engine {self.url} answered nonsense: {error!r}") from error

    async def pause(self) -> None:
        await self._call("POST", "/pause?mode=wait")

    async def start_update(self) -> None:
        await self._call("POST", "/start_weight_update", {})

    async def update(self, info: Mapping[str, Any]) -> None:
        await self._call("POST", "/update_weights", {"update_info": dict(info)})

    async def finish_update(self) -> Confirmation:
        body = await self._call("POST", "/finish_weight_update", {})
        return Confirmation(engine=self.url, boot=body["boot"], version=int(body["version"]), checksum=body["checksum"])

    async def reset_prefix_cache(self) -> None:
        await self._call("POST", "/reset_prefix_cache")

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    def _answer(self, body: dict[str, Any], *, n: int, sampling: Sampling) -> Answer:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        if [choice["index"] for choice in choices] != list(range(n)):
            raise ValueError(f"{n} samples were asked for, {len(choices)} came")
        start, end = body["rondo"]["version"]
        return Answer(
            engine=self.url,
            boot=body["rondo"]["boot"],
            version=(int(start), int(end)),
            responses=tuple(_response(choice, sampling) for choice in choices),
        )

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=self._timeout) as reply:
                if reply.status != 200:
                    raise EngineError(f"engine {self.url} refused {path}: {_reason(await reply.text())}")
                answer = await reply.json(content_type=None)
                return answer if isinstance(answer, dict) else {}
        except TimeoutError:
            raise EngineError(f"engine {self.url} did not answer {path} within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"engine {self.url} failed at {path}: {error}") from error


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


def _reason(text: str) -> str:
    return " ".join(text.split())[:300]
