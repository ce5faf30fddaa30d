"""An engine that answers garbage: every kind is thrown away and asked for again; one that goes on ends the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from rondo.errors import EngineError
from rondo.rollout.background import Background
from tests.invariants.harness import run_here


def _first(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]  # type: ignore[no-any-return]


# What a lying engine makes of an answer; None: it refuses.
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "token 99 of a vocabulary": lambda answer: _first(answer)["token_ids"].__setitem__(0, 99),
    "token -1 of a vocabulary": lambda answer: _first(answer)["token_ids"].__setitem__(0, -1),
    "a log-prob that is not a number below 0": lambda answer: _first(answer)["logprobs"]["token_logprobs"].__setitem__(
        0, float("nan")
    ),
    "4 samples were asked for, 3 came": lambda answer: answer["choices"].pop(),
    "with weights of version 7": lambda answer: answer["rondo"].__setitem__("version", [7, 7]),
    "log-probs of at most": lambda answer: _first(answer)["logprobs"]["token_logprobs"].pop(),
    "answered nonsense": lambda answer: answer.__setitem__("choices", 5),
}


class Liar:
    """Stands before a real engine; lies in the next answers as told."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.lies: list[str] = []
        self.forever = ""
        self._background = Background("liar")
        self.url = self._background.call(self._start())

    async def _start(self) -> str:
        self._session = aiohttp.ClientSession()
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _pass(self, request: web.Request) -> web.Response:
        url = self._engine + str(request.rel_url)
        async with self._session.request(request.method, url, data=await request.read()) as reply:
            answer = await reply.json()
            status = reply.status
        sampled = isinstance(answer, dict) and len(answer.get("choices", ())) == 4
        if sampled and (lie := self.lies.pop(0) if self.lies else self.forever):
            LIES[lie](answer)
        return web.json_response(answer, status=status)

    async def _stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    def close(self) -> None:
        self._background.call(self._stop())
        self._background.close()


@pytest.fixture
def liar(engine):
    made = Liar(engine)
    yield made
    made.close()


def test_garbage_of_every_kind_costs_no_sample_and_no_bit(tree, liar, engine, capsys):
    exact = {"schedule__order": "prompt", "engines__max_retries": len(LIES)}
    honest, _ = run_here(tree(**exact))
    liar.lies = list(LIES)
    weights, _ = run_here(tree(engines__urls=[liar.url], **exact))
    assert not liar.lies
    assert all(map(torch.equal, honest, weights))
    said = capsys.readouterr().out
    for lie in LIES:
        assert lie in said
    assert said.count("the request is sent again") == len(LIES)


@pytest.mark.parametrize("lie", ["token 99 of a vocabulary", "with weights of version 7"])
def test_an_engine_that_goes_on_lying_ends_the_run_with_the_evidence(tree, liar, lie):
    liar.forever = lie
    config = tree(engines__urls=[liar.url], engines__max_retries=1)
    with pytest.raises(EngineError, match=r"a request failed 2 times \(engines\.max_retries\).*" + lie) as caught:
        run_here(config)
    path = Path(re.findall(r"all of it is in (\S+)", str(caught.value))[0])
    assert path.parent == Path(config["run"]["folder"]) / "evidence"
    record = json.loads(path.read_text())
    assert record["asked"]["n"] == 4
    assert [lie in failure["error"] for failure in record["failures"]] == [True, True]
    assert all(failure["engine"] == f"engine {liar.url}" for failure in record["failures"])
