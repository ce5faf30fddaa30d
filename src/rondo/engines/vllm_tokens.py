"""What Rondo adds to vLLM's HTTP server: completions of token ids, without the objects that vLLM makes per token.

Given to vLLM as `--middleware`, it answers POST /rondo/generate itself and passes everything else on. Through vLLM's
own `/v1/completions` a log-prob costs its server twice what the token costs, which with hundreds of sequences is more
than the device needs for the whole step (docs/performance.md).

It runs in vLLM's own environment: it imports vLLM, and of Rondo nothing. No token of its own is checked here: whoever
guards the server must stand before it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

PATH = "/rondo/generate"
LARGEST_BODY = 64 << 20

FIELDS = ("n", "seed", "temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "ignore_eos")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]


class TokenCompletions:
    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        if scope["method"] != "POST":  # to see whether it is there
            await _send(send, 200, {})
            return
        try:
            body = json.loads(await _body(receive))
            answering = asyncio.ensure_future(_answer(scope["app"].state.engine_client, body))
        except (ValueError, RecursionError) as error:
            await _send(send, 400, {"error": {"message": f"the body is not JSON: {error}"}})
            return
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                status, answer = answering.result()
                await _send(send, status, answer)
        finally:  # a client that has gone: vLLM aborts what nobody waits for
            for task in (answering, leaving):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _answer(engine: Any, body: Any) -> tuple[int, dict[str, Any]]:
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    try:
        prompt = [int(token) for token in body["prompt"]]
        sampling = SamplingParams(
            **{name: body[name] for name in FIELDS if name in body},
            logprobs=0,  # that of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        inputs = {"type": "token", "prompt_token_ids": prompt}
        async for output in engine.generate(inputs, sampling, f"rondo-{uuid.uuid4().hex}"):
            last = output
    except (KeyError, TypeError, ValueError) as error:
        return 400, {"error": {"message": f"{type(error).__name__}: {error}"}}
    return 200, {"choices": [_choice(choice) for choice in last.outputs]}


def _choice(choice: Any) -> dict[str, Any]:
    flat = choice.logprobs
    return {
        "index": choice.index,
        "token_ids": list(choice.token_ids),
        # Of the entries of a position the sampled token's is the first.
        "logprobs": {"token_logprobs": [flat.logprobs[start] for start in flat.start_indices]},
        "finish_reason": choice.finish_reason,
    }


async def _body(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("it ended early")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST_BODY:
            raise ValueError(f"it is longer than {LARGEST_BODY} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
