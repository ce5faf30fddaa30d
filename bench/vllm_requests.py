"""What Rondo's ways cost in vLLM: a seed per request, and a look at the workers after every answer.

Variants take turns in one run. Needs vLLM (docs/vllm.md); the model is tiny, so that such costs show.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from rondo.config import ASSETS
from rondo.engines.client import HttpEngine
from rondo.engines.http import Caller
from rondo.types import Sampling

PROMPTS, SAMPLES, TOKENS, ROUNDS = 32, 8, 48, 7
BODY = {
    "n": SAMPLES, "temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0,
    "return_token_ids": True, "return_tokens_as_token_ids": True,
}  # fmt: skip


async def measure(url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        engine, caller = HttpEngine(url, session, seconds=300), Caller(url, session, seconds=300)
        await engine.state()

        async def plain(number: int) -> object:
            return await caller.post("/v1/completions", BODY | {"prompt": [5, 6 + number % 20, 7]})

        async def seeded(number: int) -> object:
            body = BODY | {"prompt": [5, 6 + number % 20, 7], "seed": 2**61 + 100 * number}
            return await caller.post("/v1/completions", body)

        async def vouched(number: int) -> object:
            prompt = [5, 6 + number % 20, 7]
            sampling = Sampling(temperature=1.0, max_tokens=TOKENS, stop_token_ids=(), ignore_eos=True)
            return await engine.generate(prompt, n=SAMPLES, seed=2**61 + 100 * number, sampling=sampling)

        variants: dict[str, Callable[[int], Awaitable[object]]] = {
            "no seeds": plain,
            "a seed per request": seeded,
            "seeds, and a look after every answer": vouched,
        }
        rates: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(ROUNDS + 1):
            for name, ask in variants.items():
                began = time.monotonic()
                await asyncio.gather(*(ask(number) for number in range(PROMPTS)))
                if turn:  # the first warms up
                    rates[name].append(PROMPTS * SAMPLES * TOKENS / (time.monotonic() - began))
        base = statistics.median(rates["no seeds"])
        for name, values in rates.items():
            middle = statistics.median(values)
            span = f"({min(values):.0f} to {max(values):.0f})"
            print(f"{name:40s} {middle:8.0f} tokens/s  {span}, {middle / base:.2f} of the first")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        announcement = Path(folder) / "engine.json"
        command = [sys.executable, "-m", "rondo", "serve", "--backend", "vllm", "--model", str(ASSETS / "arithmetic")]
        command += ["--slots", "64", "--max-model-len", "64", "--announce", str(announcement)]
        server = subprocess.Popen([*command, "--argument=--enforce-eager"], stdout=subprocess.DEVNULL)
        try:
            while not announcement.exists():
                if server.poll() is not None:
                    sys.exit("vLLM did not start: run `rondo serve --backend vllm` to see why")
                time.sleep(0.2)
            print(
                f"{PROMPTS} prompts x {SAMPLES} samples x {TOKENS} tokens, arithmetic model, median of {ROUNDS} turns"
            )
            asyncio.run(measure(json.loads(announcement.read_text())["url"]))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
