"""The client against hand-written servers: who they are, what they lack, and whether an answer can be trusted."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web

from rondo.engines.client import HttpEngine
from rondo.engines.pool import EnginePool, Seat
from rondo.engines.protocol import EngineState
from rondo.engines.vllm_control import parse_version
from rondo.errors import AddressError, EngineError
from rondo.launch.fleet import check_shape
from rondo.types import Confirmation, Sampling

T = TypeVar("T")
SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(1,))


class FakeVllm:
    """As much of vLLM with Rondo's worker extension as the client sees."""

    def __init__(
        self,
        *,
        version: str = "0.32.0",
        workers: int = 1,
        dev_mode: bool = True,
        extension: bool = True,
        middleware: bool = True,
    ):
        self.version = version
        self.middleware = middleware
        self.dev_mode = dev_mode
        self.extension = extension
        self.paused = False
        self.log: list[str] = []
        self.updates: list[str] = []
        self.answer_seconds = 0.0
        self.workers: list[dict[str, Any]] = [
            {"boot": f"b{rank}", "version": 3, "checksum": "c", "slots": 8, "max_model_len": 64,
             "shape": {"vocab_size": 32}, "logprobs_mode": "processed_logprobs"}
            for rank in range(workers)
        ]  # fmt: skip

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.get("/version", self._version),
                web.get("/is_paused", self._is_paused),
                *([web.route("*", "/rondo/generate", self._completions)] if self.middleware else []),
                *([web.post("/collective_rpc", self._rpc)] if self.dev_mode else []),
            ]
        )
        return application

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _completions(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({})
        body = await request.json()
        await asyncio.sleep(self.answer_seconds)
        self.log.append("answered")
        logprobs = {"token_logprobs": [-0.5]}
        choice = {"token_ids": [1], "logprobs": logprobs, "finish_reason": "stop"}
        return web.json_response({"choices": [choice | {"index": index} for index in range(body["n"])]})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method = body["method"]
        if not self.extension:
            words = f"Worker failed with error ''CPUWorker' object has no attribute '{method}'', please check"
            return web.json_response({"error": {"message": words, "code": 500}}, status=500)
        self.log.append(method)
        await asyncio.sleep(0.02 * random.random())
        if method == "rondo_update":
            self.updates += body["args"]
        return web.json_response({"results": self.workers})


def drive(application: web.Application, scenario: Callable[[HttpEngine], Awaitable[T]]) -> T:
    async def main() -> T:
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession() as session:
                return await scenario(HttpEngine(url, session, seconds=10))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def first_look(application: web.Application) -> EngineState:
    return drive(application, lambda engine: engine.state())


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        (FakeVllm(version="0.23.1"), r"is vLLM 0\.23\.1: Rondo needs 0\.24\.0 or newer"),
        (FakeVllm(dev_mode=False), r"was started without VLLM_SERVER_DEV_MODE=1: start it as `rondo serve --backend"),
        (FakeVllm(extension=False), r"was started without Rondo's worker extension \(.*rondo_state.*\): start it as"),
        (FakeVllm(middleware=False), r"was started without Rondo's middleware: start it as"),
    ],
)
def test_a_vllm_that_lacks_something_is_refused_in_one_sentence(server, sentence):
    with pytest.raises(EngineError, match=sentence) as caught:
        first_look(server.application())
    assert "\n" not in str(caught.value)


def test_a_vllm_whose_log_probs_are_of_another_distribution_is_refused():
    server = FakeVllm()
    server.workers[0]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(EngineError, match="--logprobs-mode raw_logprobs, which is not the distribution it samples"):
        first_look(server.application())


def test_a_server_of_another_kind_is_refused_by_address():
    with pytest.raises(EngineError, match=r"the server at http://127.* is neither a Rondo engine nor vLLM"):
        first_look(web.Application())

    async def anything(_: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>")

    chatty = web.Application()
    chatty.router.add_route("*", "/{tail:.*}", anything)
    with pytest.raises(EngineError, match="is not JSON"):
        first_look(chatty)


def test_an_address_where_nothing_listens_is_named():
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            await HttpEngine("http://127.0.0.1:9", session, seconds=5).state()

    with pytest.raises(
        EngineError, match=re.escape("http://127.0.0.1:9 failed at /rondo/state: cannot connect (Connection refused)")
    ):
        asyncio.run(main())


def test_untested_versions_are_taken_with_a_word():
    assert first_look(FakeVllm(version="0.24.0").application()).note == ""
    assert first_look(FakeVllm(version="0.32.0+cpu").application()).note == ""
    assert re.search(
        r"is vLLM 0\.28\.1; Rondo is tested with 0\.24\.0 and 0\.32\.0",
        first_look(FakeVllm(version="0.28.1").application()).note,
    )
    assert parse_version("0.24.0rc2") == (0, 24, 0)
    assert parse_version("nightly") == (0, 0, 0)


def test_an_engine_that_serves_another_model_is_named_with_both_sizes():
    check_shape("http://e", {"vocab_size": 32}, {"vocab_size": 32, "hidden_size": 8}, "m")
    with pytest.raises(AddressError, match=r"http://e serves another model: its vocab_size is 64, but .* has 32"):
        check_shape("http://e", {"vocab_size": 64}, {"vocab_size": 32}, "m")


def test_workers_that_hold_different_versions_are_a_broken_engine():
    server = FakeVllm(workers=2)
    assert first_look(server.application()).boot == "b0-b1"
    server.workers[1]["version"] = 2
    assert first_look(server.application()).version == -2


def test_weights_are_not_given_to_a_vllm_that_runs():
    with pytest.raises(EngineError, match="is not paused"):
        drive(FakeVllm().application(), lambda engine: engine.start_update())


def test_what_a_worker_complains_of_is_passed_on():
    server = FakeVllm()
    server.paused = True

    async def scenario(engine: HttpEngine) -> None:
        await engine.start_update()
        server.workers[0]["error"] = "the file is torn"
        await engine.update({"version": 1})

    with pytest.raises(EngineError, match="refused rondo_update: the file is torn"):
        drive(server.application(), scenario)


def test_updates_arrive_in_the_order_in_which_they_were_given():
    server = FakeVllm()
    server.paused = True

    async def scenario(engine: HttpEngine) -> None:
        await engine.start_update()
        await asyncio.gather(*(engine.update({"number": number}) for number in range(20)))

    drive(server.application(), scenario)
    assert [json.loads(info)["number"] for info in server.updates] == list(range(20))


def test_every_answer_of_vllm_is_vouched_for_by_a_look_at_its_workers_after_it_came():
    """Those who wait at the same time share a look; none shares one that began before its answer came."""
    server = FakeVllm()

    async def scenario(engine: HttpEngine) -> list[tuple[str, tuple[int, int]]]:
        await engine.state()
        answers = await asyncio.gather(*(engine.generate([5], n=2, seed=seed, sampling=SAMPLING) for seed in range(30)))
        return [(answer.boot, answer.version) for answer in answers]

    assert drive(server.application(), scenario) == [("b0", (3, 3))] * 30
    looks = server.log.count("rondo_state")
    assert looks < 12
    assert server.log[-1] == "rondo_state"


def test_answers_of_a_vllm_that_was_restarted_meanwhile_are_void():
    server = FakeVllm()

    async def scenario(engine: HttpEngine) -> None:
        await engine.state()
        server.workers[0] |= {"boot": "another", "version": -1}
        await engine.generate([5], n=1, seed=0, sampling=SAMPLING)

    with pytest.raises(EngineError, match="was restarted while it answered: its responses are void"):
        drive(server.application(), scenario)


def test_a_vllm_that_came_back_with_its_first_weights_leaves_the_pool_and_its_request_waits_for_another():
    server = FakeVllm()
    lost: list[str] = []

    async def scenario(engine: HttpEngine) -> None:
        left = asyncio.Event()

        def on_lost(seat: Seat) -> None:
            lost.append(seat.reason)
            left.set()

        pool = EnginePool(max_retries=0, on_retry=lambda error: None, on_lost=on_lost)
        seat = await pool.add(engine)
        server.workers[0] |= {"boot": "another", "version": -1}
        asked = asyncio.ensure_future(pool.generate([5], n=1, seed=0, sampling=SAMPLING, version=3))
        await left.wait()
        assert not asked.done()
        server.workers[0]["version"] = 3  # fed again
        pool.readmit(seat, engine, await engine.state())
        pool.confirm(seat, Confirmation(engine=engine.url, boot="another", version=3, checksum=""))
        assert (await asked).boot == "another"

    drive(server.application(), scenario)
    assert "was restarted while it answered: its responses are void" in lost[0]


def test_an_answer_during_which_the_version_changed_says_so():
    server = FakeVllm()

    async def scenario(engine: HttpEngine) -> tuple[int, int]:
        await engine.state()
        server.workers[0]["version"] = 4
        return (await engine.generate([5], n=1, seed=0, sampling=SAMPLING)).version

    assert drive(server.application(), scenario) == (3, 4)


def test_an_answer_without_end_is_refused_and_not_kept_in_memory(monkeypatch):
    monkeypatch.setattr("rondo.engines.http.LARGEST_ANSWER", 1 << 20)
    sent = []

    async def endless(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for _ in range(200):
            sent.append(await reply.write(b" " * (1 << 20)))
        return reply

    application = web.Application()
    application.router.add_get("/rondo/state", endless)
    with pytest.raises(EngineError, match="answered /rondo/state with more than 1 MB"):
        first_look(application)
    assert len(sent) < 200
