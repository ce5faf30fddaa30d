"""Malformed requests against both endpoints, drawn by hypothesis from the documented API: an answer below 500 to each,
nothing changed without the token, and both alive at the end.

    python -m tests.soak.malformed [--requests 10000] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from rondo.config import ASSETS
from rondo.engines.pool import EnginePool
from rondo.launch.control import Control
from tests.conftest import start_engine

TOKEN = "the-token-of-a-test"
ENGINE = {
    "GET": ["/health", "/v1/models", "/rondo/state"],
    "POST": ["/v1/completions", "/pause", "/resume", "/reset_prefix_cache", "/start_weight_update", "/update_weights",
             "/finish_weight_update"],
}  # fmt: skip
CONTROL = {"GET": ["/engines", "/status"], "POST": ["/join", "/leave"]}
OPEN = "/health"

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)


values = st.recursive(scalars, nested, max_leaves=8)
tokens = st.lists(st.integers(-5, 200) | scalars, max_size=6)
fields = {
    "prompt": tokens | values,
    "n": st.integers(-2, 5) | values,
    "seed": st.integers(-(2**70), 2**70) | values,
    "max_tokens": st.integers(-2, 8) | values,
    "temperature": st.floats() | values,
    "top_p": st.floats() | values,
    "logprobs": st.integers(-1, 3) | values,
    "stop_token_ids": tokens | values,
    "return_token_ids": st.booleans() | values,
    "model": values,
    "version": values,
    "checksum": values,
    "files": values,
    "tensors": values,
    "transport": values,
    "url": st.sampled_from(["http://127.0.0.1:1", "http://[::1", "file:///etc/passwd", "http://"]) | values,
    "token": values,
    "now": values,
}
bodies = (
    st.fixed_dictionaries({}, optional=fields).map(lambda body: json.dumps(body).encode())
    | values.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=64)
    | st.integers(1, 20_000).map(lambda depth: b"[" * depth)
)
strange = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)
credentials = st.integers(0, 9).flatmap(  # two in three may come in
    lambda chance: st.just(f"Bearer {TOKEN}") if chance < 7 else st.none() | strange | st.just(f"Bearer {TOKEN}x")
)


@dataclass(frozen=True, kw_only=True)
class Shot:
    control: bool
    method: str
    path: str
    body: bytes
    credential: str | None
    kind: str

    @property
    def shows_token(self) -> bool:
        scheme, _, word = (self.credential or "").partition(" ")
        return scheme.lower() == "bearer" and word.strip() == TOKEN


@st.composite
def shots(draw: st.DrawFn) -> Shot:
    control = draw(st.booleans())
    calls = CONTROL if control else ENGINE
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET"]))
    path = draw(st.sampled_from(calls[method]))
    if draw(st.integers(0, 9)) == 0:
        path += draw(st.sampled_from(["?mode=wait", "?mode=%00", "/..", "//", "?x=" + "y" * 5000]))
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"]))
    credential = draw(credentials)
    kind = draw(st.sampled_from(["application/json", "text/plain", "multipart/form-data", ""]))
    return Shot(control=control, method=method, path=path, body=draw(bodies), credential=credential, kind=kind)


class NoFleet:
    """Nobody joins: every address is unreachable, which is an answer."""

    def __init__(self) -> None:
        self.pool = EnginePool(max_retries=0, on_retry=print)
        self.asked: list[str] = []

    async def join(self, url: str, token: str) -> None:
        from rondo.errors import AddressError

        self.asked.append(url)
        raise AddressError(f"{url} cannot be reached")

    async def leave(self, url: str, *, now: bool) -> None:
        await self.join(url, "")


@contextmanager
def engine(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    os.environ["RONDO_TOKEN"] = TOKEN
    try:
        options = ["--model", str(ASSETS / "arithmetic"), "--slots", "4", "--max-model-len", "32"]
        process, url = start_engine(folder / "engine.json", *options)
    finally:
        del os.environ["RONDO_TOKEN"]
    try:
        yield process, url
    finally:
        process.terminate()
        process.wait(timeout=20)


async def ask(session: aiohttp.ClientSession, base: str, shot: Shot) -> int:
    headers = {"Content-Type": shot.kind} if shot.kind else {}
    if shot.credential is not None:
        headers["Authorization"] = shot.credential
    from yarl import URL

    url = URL(base + shot.path, encoded=True)
    async with session.request(shot.method, url, data=shot.body or None, headers=headers) as answer:
        await answer.read()
        return answer.status


def fire(requests: int, seed: int) -> Counter[int]:
    """Statuses, counted; raises at the first answer that should not be."""
    statuses: Counter[int] = Counter()
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="rondo-malformed-") as name, engine(Path(name)) as (process, url):
        fleet = NoFleet()
        control = Control(fleet, folder=Path(name), host="127.0.0.1", port=0, token=TOKEN)  # type: ignore[arg-type]
        loop.run_until_complete(control.start())
        own = json.loads((Path(name) / "control.json").read_text())["url"]
        session = loop.run_until_complete(_session())

        def state() -> dict[str, Any]:
            shot = aiohttp.ClientTimeout(total=30)

            async def get() -> dict[str, Any]:
                headers = {"Authorization": f"Bearer {TOKEN}"}
                async with session.get(url + "/rondo/state", headers=headers, timeout=shot) as answer:
                    found: dict[str, Any] = await answer.json()
                    return found

            return loop.run_until_complete(get())

        @seeded(seed)
        @settings(
            max_examples=requests, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(shot=shots())
        def every(shot: Shot) -> None:
            held = state() if not shot.shows_token and not shot.control else None
            before = len(fleet.asked)
            status = loop.run_until_complete(ask(session, own if shot.control else url, shot))
            statuses[status] += 1
            assert status < 500 or (status == 503 and shot.shows_token), (shot, status)
            assert process.poll() is None, shot
            if not shot.shows_token:
                harmless = not shot.control and shot.path.partition("?")[0] == OPEN
                assert harmless or status >= 400, (shot, status)
                assert len(fleet.asked) == before, shot
            if held is not None:
                now = state()
                assert (held["version"], held["paused"]) == (now["version"], now["paused"]), shot
            elif not shot.control:  # with the token it may pause the engine; that must not stop the others
                loop.run_until_complete(_resume(session, url))

        try:
            every()
            assert state()["boot"]
        finally:
            loop.run_until_complete(session.close())
            loop.run_until_complete(control.close())
            loop.close()
    return statuses


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))


async def _resume(session: aiohttp.ClientSession, url: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for call in ("/finish_weight_update", "/resume"):
        async with session.post(url + call, headers=headers) as answer:
            await answer.read()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=0)
    given_ = options.parse_args()
    statuses = fire(given_.requests, given_.seed)
    sys.stdout.write(f"{sum(statuses.values())} malformed requests: {dict(sorted(statuses.items()))}\n")


if __name__ == "__main__":
    main()
