"""Calls to one server: JSON both ways, every failure an EngineError of one sentence."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from rondo.errors import EngineError, UnreachableError

LARGEST_ANSWER = 1 << 28  # bytes: a group's tokens with their log-probs are far below


class RefusedError(EngineError):
    """The server answered, and not with success."""

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NonsenseError(EngineError):
    """The server answered what no engine may: wrong ids, too few samples, a log-prob that is none."""

    def __init__(self, message: str, *, answer: Any) -> None:
        super().__init__(message)
        self.answer = answer


class RestartedError(EngineError):
    """Another process answers at this address than before."""


class Caller:
    def __init__(self, url: str, session: aiohttp.ClientSession, *, seconds: float, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=seconds)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=self._timeout, headers=self._headers
            ) as reply:
                text = await self._text(reply, path)
        except TimeoutError:
            raise UnreachableError(
                f"engine {self.url} did not answer {path} within {self._timeout.total:g} s"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnreachableError(f"engine {self.url} failed at {path}: {_cause(error)}") from error
        if reply.status != 200:
            reason = _reason(text)
            raise RefusedError(f"engine {self.url} refused {path}: {reason}", status=reply.status, reason=reason)
        try:
            answer = json.loads(text) if text else {}
        except ValueError as error:
            raise UnreachableError(
                f"engine {self.url} answered {path} with something that is not JSON: {error}"
            ) from None
        return answer if isinstance(answer, dict) else {}

    async def _text(self, reply: aiohttp.ClientResponse, path: str) -> str:
        body = await _limited(reply)
        if body is None:
            raise NonsenseError(
                f"engine {self.url} answered {path} with more than {LARGEST_ANSWER >> 20} MB", answer="too long to keep"
            )
        return body.decode(errors="replace")


async def _limited(reply: aiohttp.ClientResponse) -> bytes | None:
    """The whole body; None: it is longer than any answer may be."""
    body = bytearray()
    async for chunk in reply.content.iter_chunked(1 << 20):
        body += chunk
        if len(body) > LARGEST_ANSWER:
            return None
    return bytes(body)


def _cause(error: Exception) -> str:
    """What happened to a connection, in words: the library's own are at times a whole header."""
    match error:
        case aiohttp.ServerDisconnectedError():
            return "it closed the connection"
        case aiohttp.ClientPayloadError():
            return "its answer broke off"
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno
            return f"cannot connect ({os.strerror(number) if number else error.os_error})"
        case UnicodeDecodeError() | aiohttp.ClientResponseError():
            return "its answer is garbled"
        case _:
            return " ".join(str(error).split())[:200] or type(error).__name__


def _reason(text: str) -> str:
    """The sentence inside an error body of the OpenAI kind, else the text itself."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return " ".join(str(text).split())[:300]
