"""Tokens: who shows one, where it lies, and what is refused without it."""

from __future__ import annotations

import asyncio
import json
import stat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rondo.engines.bearer import TOKEN, RequireToken, allowed, check_host, is_loopback, read_token, run_token
from rondo.engines.guest import find_control, reachable
from rondo.engines.server import serve
from rondo.errors import AddressError, ConfigError


@given(st.one_of(st.none(), st.text(), st.binary()))
def test_only_the_token_itself_opens_a_door(header):
    assert not allowed(header, "a-long-word")
    assert allowed(header, "")


def test_the_token_is_shown_as_a_bearer():
    assert allowed("Bearer word", "word")
    assert allowed(b"bearer  word ", "word")
    for wrong in ("word", "Basic word", "Bearer wor", "Bearer words", "Bearer", "Bearer word x"):
        assert not allowed(wrong, "word")


def test_a_run_makes_one_token_which_its_owner_alone_can_read(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    token = run_token(tmp_path)
    assert len(token) > 30
    assert run_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    monkeypatch.setenv(TOKEN, "chosen")
    assert run_token(tmp_path) == "chosen"
    assert read_token(tmp_path / "token") == "chosen"
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "nothing")


def test_what_other_machines_can_reach_needs_a_token():
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")  # noqa: PT018
    check_host("127.0.0.1", "")
    check_host("0.0.0.0", "word")
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines in, and there is no token"):
        check_host("0.0.0.0", "")
    with pytest.raises(ConfigError, match="no token to keep them out"):
        serve(model="any", host="10.0.0.1")


def call(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> list[dict[str, Any]]:
    """What a server behind the middleware sends; an inner one says `passed`."""
    sent: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "passed"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> None: ...

    scope = {"type": kind, "path": path, "headers": list(headers)}
    asyncio.run(RequireToken(inner)(scope, receive, send))
    return sent


def test_vllm_answers_nothing_but_health_without_the_token(monkeypatch):
    monkeypatch.setenv(TOKEN, "word")
    right, wrong = (b"authorization", b"Bearer word"), (b"authorization", b"Bearer no")
    for path in ("/v1/completions", "/collective_rpc", "/pause", "/health/", "//health", "/"):
        assert call(path, right) == [{"type": "passed"}]
        for headers in ((), (wrong,), (wrong, right)):
            refused = call(path, *headers)
            assert refused[0]["status"] == 401
            assert "demands the run's token" in json.loads(refused[1]["body"])["error"]["message"]
    assert call("/health") == call("", kind="lifespan") == [{"type": "passed"}]
    assert call("/ws", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    monkeypatch.delenv(TOKEN)
    assert call("/v1/completions") == [{"type": "passed"}]


def test_a_run_is_found_by_its_folder_or_by_its_address_with_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    (tmp_path / "control.json").write_text(json.dumps({"url": "http://127.0.0.1:5", "token": "word"}))
    assert find_control(str(tmp_path)).token == "word"
    with pytest.raises(AddressError, match="give the folder of a run that is going"):
        find_control(str(tmp_path / "other"))
    with pytest.raises(AddressError, match="demands its token: set RONDO_TOKEN"):
        find_control("http://127.0.0.1:5")
    monkeypatch.setenv(TOKEN, "word")
    assert find_control("http://127.0.0.1:5/").url == "http://127.0.0.1:5"
    with pytest.raises(AddressError, match=r"no run answers at http://127\.0\.0\.1:9 .*: is it still going\?"):
        find_control("http://127.0.0.1:9").ask("/engines")


def test_an_engine_that_listens_everywhere_names_the_address_that_the_run_can_reach():
    assert reachable("0.0.0.0", "http://127.0.0.1:80") == "127.0.0.1"
    assert reachable("10.1.2.3", "http://127.0.0.1:80") == "10.1.2.3"
