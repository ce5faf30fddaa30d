"""What the producer's side costs beside the engines: HTTP, JSON, dispatch, scoring, the queue.

    python bench/producer.py [--groups 10000] [--json PATH]

A fake engine in a process of its own answers every request at once, with 8 responses of 32 tokens. The real client,
pool, producer and queue ask it for all groups; every group must arrive, once. With `reward workers` each group also
goes through a real reward process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from rondo.engines.client import HttpEngine
from rondo.engines.pool import EnginePool
from rondo.observe.samples import SampleAccount
from rondo.rewards.runner import RewardRunner, Scores
from rondo.rollout.advantage import advantages_of
from rondo.rollout.background import Background
from rondo.rollout.producer import Producer, ProducerSettings
from rondo.stream.queue import GroupQueue
from rondo.types import Group, Prompt, Sampling

GROUP, LENGTH, SLOTS = 8, 32, 512


def fake_engine(port: Any) -> None:
    """Answers the two calls that are made, from memory."""
    choice = {
        "token_ids": [7] * LENGTH,
        "logprobs": {"token_logprobs": [-1.2345678] * LENGTH},
        "finish_reason": "length",
    }
    answer = {
        "choices": [{"index": number, "text": "", **choice} for number in range(GROUP)],
        "rondo": {"boot": "b", "version": [0, 0]},
    }
    state = {"boot": "b", "version": 0, "slots": SLOTS, "max_model_len": 4096}
    said = {b"GET": json.dumps(state).encode(), b"POS": json.dumps(answer).encode()}
    whole = {
        verb: b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for verb, body in said.items()
    }

    async def next_head(reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await next_head(reader):
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
            )
            await reader.readexactly(length)
            writer.write(whole[head[:3]])

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


class AtOnce:
    """Scores without leaving the loop."""

    async def score(
        self, prompt: Any, completions: list[str], completion_ids: Any, columns: Mapping[str, Any]
    ) -> Scores:
        return Scores(rewards=tuple(map(float, range(GROUP))), parts={}, failed=0)

    async def start(self) -> None: ...
    async def close(self) -> None: ...


async def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


def measure(url: str, groups: int, scorer: Any) -> dict[str, float]:
    background, queue = Background("producer"), GroupQueue()
    background.call(scorer.start())
    session = background.call(open_session())
    pool = EnginePool(max_retries=0, on_retry=print)
    background.call(pool.add(HttpEngine(url, session, seconds=60)))
    producer = Producer(
        background=background,
        pool=pool,
        scorer=scorer,
        queue=queue,
        decode=lambda token_ids: "x" * len(token_ids),
        settings=ProducerSettings(
            run_seed=0,
            group_size=GROUP,
            sampling=Sampling(temperature=1.0, max_tokens=LENGTH, stop_token_ids=(1,)),
            advantages=advantages_of("grpo", scale=True),
        ),
        accounts=SampleAccount(),
        on_group=lambda group, kept: None,
        on_shortfall=print,
    )

    def prompt(index: int) -> Prompt:
        return Prompt(ordinal=index, text="?", token_ids=tuple(range(32)), columns={"answer": "x"})

    background.cpu_seconds()
    began = time.perf_counter()
    producer.begin(0, prompt, groups=groups)
    arrived = set()
    while len(arrived) < groups:
        group = queue.get(seconds=30)
        if not isinstance(group, Group) or group.index in arrived:
            sys.exit(f"lost or doubled: {group}")
        arrived.add(group.index)
    seconds = time.perf_counter() - began
    assert producer.finish() == groups
    cpu = background.cpu_seconds()
    background.call(scorer.close())
    background.call(session.close())
    background.close()
    return {"groups": groups, "per_second": groups / seconds, "us_per_group": 1e6 * cpu / groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    receiving, sending = multiprocessing.Pipe(duplex=False)
    engine = multiprocessing.Process(target=fake_engine, args=(sending,), daemon=True)
    engine.start()
    url = f"http://127.0.0.1:{receiving.recv()}"
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        workers = RewardRunner(
            functions=["rondo.rewards.arithmetic:correct"],
            weights=(1.0,),
            seconds=30.0,
            on_error="fail",
            workers=1,
            log=Path(folder) / "rewards.log",
            evidence=Path(folder) / "evidence",
        )
        for name, scorer in (("scored at once", AtOnce()), ("reward workers", workers)):
            figures[name] = measured = measure(url, arguments.groups, scorer)
            print(
                f"{name:<16} {measured['groups']} groups, none lost: {measured['per_second']:6.0f} per second, "
                f"{measured['us_per_group']:5.0f} us of the producer's thread per group",
                flush=True,
            )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
    engine.terminate()
    engine.join()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
