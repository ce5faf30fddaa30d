"""The control endpoint over real HTTP, with a fleet of in-memory engines; and what strangers may send it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rondo.engines.pool import Seat
from rondo.errors import AddressError, EngineError
from rondo.launch.control import Control
from rondo.rollout.background import Background
from tests.unit.test_pool import FakeEngine, pool_of

TOKEN = "a word that is hard to guess"


class FakeFleet:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def fill(self) -> None:
        self.pool = await pool_of(FakeEngine("http://here:1"))

    async def join(self, url: str, token: str = "") -> Seat:
        self.calls.append(("join", url, token))
        if url == "http://other:1":
            raise AddressError("engine http://other:1 serves another model")
        return self.pool.seats[0]

    async def leave(self, url: str, *, now: bool) -> None:
        self.calls.append(("leave", url, now))
        if url == "http://nobody:1":
            raise EngineError("takes no part")


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.background = Background("test")
        self.fleet = FakeFleet()
        self.background.call(self.fleet.fill())
        self.control = Control(self.fleet, folder=folder, host="127.0.0.1", port=0, token=TOKEN)  # type: ignore[arg-type]
        self.background.call(self.control.start())
        self.word = json.loads((folder / "control.json").read_text())
        self.session = self.background.call(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def ask(self, method: str, path: str, body: bytes | None = None, header: str = f"Bearer {TOKEN}") -> Any:
        async def go() -> tuple[int, Any]:
            headers = {"Authorization": header} if header else {}
            async with self.session.request(method, self.word["url"] + path, data=body, headers=headers) as reply:
                text = await reply.text()
                return reply.status, json.loads(text) if text.startswith("{") else text

        return self.background.call(go())

    def close(self) -> None:
        self.background.call(self.control.close())
        self.background.call(self.session.close())
        self.background.close()


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    made = Desk(tmp_path_factory.mktemp("control"))
    yield made
    made.close()
    assert not (made.folder / "control.json").exists()


def test_its_address_and_token_are_its_owners_alone(desk):
    assert stat.S_IMODE((desk.folder / "control.json").stat().st_mode) == 0o600
    assert desk.word["url"].startswith("http://127.0.0.1:")


def test_engines_are_listed_with_load_version_and_throughput(desk):
    status, answer = desk.ask("GET", "/engines")
    assert status == 200
    wanted = {"url", "state", "in_flight", "slots", "version", "boot", "tokens_per_second", "retries", "losses"}
    assert wanted <= answer["engines"][0].keys()
    assert desk.ask("GET", "/status")[1]["ready"] == 1


def test_joining_and_leaving_are_passed_on_and_refusals_say_why(desk):
    assert desk.ask("POST", "/join", b'{"url": "http://new:1/", "token": "own"}')[0] == 200
    assert desk.fleet.calls[-1] == ("join", "http://new:1", "own")
    assert desk.ask("POST", "/leave", b'{"url": "http://new:1", "now": true}') == (200, {"left": "http://new:1"})
    assert desk.fleet.calls[-1] == ("leave", "http://new:1", True)
    status, answer = desk.ask("POST", "/join", b'{"url": "http://other:1"}')
    assert (status, answer["error"]["message"]) == (409, "engine http://other:1 serves another model")
    assert desk.ask("POST", "/leave", b'{"url": "http://nobody:1"}')[0] == 409


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer no", TOKEN, f"Basic {TOKEN}"])
def test_nothing_is_answered_without_the_token(desk, header):
    before = len(desk.fleet.calls)
    for method, path in (("GET", "/engines"), ("GET", "/status"), ("POST", "/join"), ("POST", "/leave"), ("GET", "/x")):
        assert desk.ask(method, path, b'{"url": "http://new:1"}' if method == "POST" else None, header)[0] == 401
    assert len(desk.fleet.calls) == before


def test_a_body_that_is_too_large_is_refused(desk):
    assert desk.ask("POST", "/join", b" " * 100_000)[0] == 413


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/join", "/leave"]),
    body=st.one_of(
        st.binary(max_size=200),
        anything.map(lambda value: json.dumps(value).encode()),
        st.fixed_dictionaries({"url": anything, "now": anything, "token": anything}).map(
            lambda value: json.dumps(value).encode()
        ),
        st.text().map(lambda text: json.dumps({"url": f"http://{text}"}).encode()),
    ),
)
def test_whatever_is_sent_is_answered_with_a_sentence_and_never_with_a_crash(desk, path, body):
    status, answer = desk.ask("POST", path, body)
    assert status in (200, 400, 409)
    assert status == 200 or answer["error"]["message"]
