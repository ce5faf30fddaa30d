"""A run that stands still says what it waits for, from whom, for how long; and so does one that is asked."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import aiohttp
from aiohttp import web

from rondo.launch.waits import watch_requests, watch_trainer
from rondo.observe.diagnosis import Waits, Watch
from rondo.observe.lane import Lane


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_is_told_once_per_limit_with_what_is_awaited():
    clock, said = Clock(), []
    waits = Waits(clock=clock)
    watch = Watch(waits=waits, silence_seconds=30, say=said.append, clock=clock)
    with waits.awaiting("groups", "the producer", lambda: "period 3: 2 of 8 groups (1, 5)"):
        clock.now += 10
        first, second = (waits.begin("an answer to POST /v1/completions", "http://engine") for _ in range(2))
        for _ in range(29):
            clock.now += 1
            watch.look()
        assert said[0].splitlines() == [
            "nothing has moved for 30 s:",
            "  waiting for groups from the producer, for 30 s: period 3: 2 of 8 groups (1, 5)",
            "  waiting for 2 x an answer to POST /v1/completions from http://engine, the oldest for 20 s",
        ]
        clock.now += 21
        watch.look()
        assert len(said) == 2
        waits.end(first)
        clock.now += 29
        watch.look()
        assert len(said) == 2  # something moved
        waits.end(second, moved=False)
        clock.now += 1
        watch.look()
        assert len(said) == 3


def test_a_clock_that_jumps_neither_ends_nor_begins_a_silence_for_good():
    clock, said = Clock(), []
    waits = Waits(clock=clock)
    watch = Watch(waits=waits, silence_seconds=30, say=said.append, clock=clock)
    clock.now -= 3600  # no monotonic clock does; nothing breaks even so
    watch.look()
    assert not said
    clock.now += 7200
    watch.look()
    watch.look()
    assert len(said) == 1
    assert said[0].endswith("nothing is awaited")


def test_one_who_works_is_not_still():
    clock, events, lane = Clock(), [0], Lane("training")
    waits = Waits(clock=clock)
    watch_trainer(lane, 2, lambda: events[0], waits)
    for _ in range(5):
        clock.now += 20
        events[0] += 1
        assert waits.still_for() == 0
    clock.now += 20
    assert waits.still_for() == 20
    lane.switch("stepping")
    assert waits.still_for() == 0
    assert waits.lines() == ["the trainer is stepping, as rank 0 of 2"]


def test_every_request_is_a_wait_by_engine_and_call_and_a_sign_of_life_is_no_movement():
    async def go() -> None:
        release = asyncio.Event()

        async def slow(request: web.Request) -> web.Response:
            await release.wait()
            return web.Response()

        async def alive(request: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/v1/completions", slow), web.get("/health", alive)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        clock = Clock()
        waits = Waits(clock=clock)
        async with aiohttp.ClientSession() as session:
            watch_requests(session, waits)
            asking = [asyncio.create_task(session.post(url + "/v1/completions")) for _ in range(3)]
            await asyncio.sleep(0.1)
            clock.now += 12
            await session.get(url + "/health")
            assert waits.still_for() == 12
            asked = "an answer to POST /v1/completions"
            assert waits.lines() == [f"waiting for 3 x {asked} from {url}, the oldest for 12 s"]
            release.set()
            await asyncio.gather(*asking)
            assert waits.still_for() == 0
            assert not waits.lines()
        await runner.cleanup()

    asyncio.run(go())


def test_a_signal_is_answered_even_while_the_main_thread_is_in_a_library():
    program = """
import ctypes, os, signal, sys, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # may be the one that the signal reaches
from rondo.observe.diagnosis import Waits, Watch, listen
waits = Waits()
Watch(waits=waits, silence_seconds=600, say=lambda text: os.write(1, text.encode() + b"\\n"), signals=listen()).start()
waits.begin("a word", "a friend")
lib = ctypes.CDLL(None)
while True:
    lib.usleep(10_000_000)
"""
    blocked = {signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # as the launcher does, for children that are not ready yet
    try:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        os.kill(child.pid, signal.SIGUSR1)  # at once
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "asked by SIGUSR1:\n"
        assert child.stdout.readline() in ("  waiting for a word from a friend, for 0 s\n", "  nothing is awaited\n")
        os.kill(child.pid, signal.SIGUSR1)
        assert child.stdout.readline() == "asked by SIGUSR1:\n"
        assert child.stdout.readline() == "  waiting for a word from a friend, for 0 s\n"
    finally:
        child.kill()
        child.communicate()
