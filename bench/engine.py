"""How fast the embedded engine generates, beside transformers' own two ways. One thread, interleaved, medians.

    python bench/engine.py [--repetitions 7] [--json PATH]

The work: 16 prompts of 24 tokens, 8 samples each, 32 new tokens, for a random 4-layer Qwen2 of width 128. End of
sequence is ignored by all. Every variant but transformers' returns log-probs as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from rondo.engines.embedded import EmbeddedEngine, Request
from rondo.types import Sampling

PROMPTS, PROMPT_TOKENS, SAMPLES, NEW_TOKENS = 16, 24, 8, 32
CONTEXT = PROMPT_TOKENS + NEW_TOKENS
VOCABULARY = 1024
TOTAL = PROMPTS * SAMPLES * NEW_TOKENS

Work = Callable[[], int]  # runs once and returns the number of tokens generated


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=7)
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model().save_pretrained(folder)
        with Served(folder) as server:
            seconds = measure(variants(prompts, server), options.repetitions)
    show(seconds)
    if options.json:
        options.json.write_text(json.dumps({"tokens": TOTAL, "threads": 1, "seconds": seconds}, indent=2) + "\n")


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()


def variants(prompts: list[list[int]], server: Served) -> dict[str, Work]:
    return {
        "transformers generate, 128 rows": padded_generate(prompts, rows=128),
        "transformers generate, 16 rows at a time": padded_generate(prompts, rows=16),
        "transformers continuous batching": continuous_batching(prompts),
        "rondo, 128 slots": engine(prompts, slots=128),
        "rondo, 128 slots, batch-invariant": engine(prompts, slots=128, batch_invariant=True),
        "rondo, 16 slots": engine(prompts, slots=16),
        "rondo, 16 slots, batch-invariant": engine(prompts, slots=16, batch_invariant=True),
        "rondo over HTTP, 128 slots": lambda: server.generate(prompts),
    }


def padded_generate(prompts: list[list[int]], *, rows: int) -> Work:
    own = model()
    ids = torch.tensor([prompt for prompt in prompts for _ in range(SAMPLES)])
    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0)

    def work() -> int:
        tokens = 0
        with torch.inference_mode():
            for batch in ids.split(rows):
                out = own.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
                tokens += out[:, PROMPT_TOKENS:].numel()
        return tokens

    return work


def continuous_batching(prompts: list[list[int]]) -> Work:
    own = model()
    inputs = [prompt for prompt in prompts for _ in range(SAMPLES)]
    settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=-1)
    batching = ContinuousBatchingConfig(page_size=64, num_blocks=2 * len(inputs), max_batch_tokens=1024)

    def work() -> int:
        results = own.generate_batch(
            inputs, generation_config=settings, continuous_batching_config=batching, persistent_manager=True
        )
        return sum(len(result.generated_tokens) for result in results.values())

    return work


def engine(prompts: list[list[int]], *, slots: int, batch_invariant: bool = False) -> Work:
    own = EmbeddedEngine(model(), slots=slots, max_model_len=CONTEXT, batch_invariant=batch_invariant)
    sampling = Sampling(temperature=1.0, max_tokens=NEW_TOKENS, stop_token_ids=())

    def work() -> int:
        for index, prompt in enumerate(prompts):
            own.submit(Request(prompt=tuple(prompt), n=SAMPLES, seed=1000 * index, sampling=sampling))
        tokens = 0
        while not own.idle:
            tokens += sum(len(s.token_ids) for result in own.step() for s in result.samples)
        return tokens

    return work


class Served:
    """`rondo serve` in a process of its own, asked for all prompts at once."""

    def __init__(self, folder: str) -> None:
        self._announce = Path(folder) / "announce.json"
        arguments = f"model={folder!r}, slots=128, max_model_len={CONTEXT}, threads=1, device='cpu'"
        self._program = (
            "from pathlib import Path; from rondo.engines.server import serve; "
            f"serve({arguments}, announce=Path({str(self._announce)!r}))"
        )

    def __enter__(self) -> Served:
        self._process = subprocess.Popen([sys.executable, "-c", self._program], stdout=subprocess.DEVNULL)
        while not self._announce.exists():
            if self._process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        self._url = json.loads(self._announce.read_text())["url"]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def generate(self, prompts: list[list[int]]) -> int:
        return asyncio.run(self._generate(prompts))

    async def _generate(self, prompts: list[list[int]]) -> int:
        async with aiohttp.ClientSession(self._url) as session:
            return sum(await asyncio.gather(*(self._ask(session, prompt) for prompt in prompts)))

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int]) -> int:
        body = {
            "prompt": prompt, "n": SAMPLES, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True, "detokenize": False,
        }  # fmt: skip
        async with session.post("/v1/completions", json=body) as reply:
            answer = await reply.json()
        return sum(len(choice["token_ids"]) for choice in answer["choices"])


def measure(works: dict[str, Work], repetitions: int) -> dict[str, list[float]]:
    """Seconds per variant. Each runs once unmeasured; one that does not work here is left out, with a line."""
    for name in list(works):
        try:
            tokens = works[name]()
        except Exception as error:
            print(f"{name}: left out, it does not run here: {type(error).__name__}: {error}")
            del works[name]
        else:
            assert tokens == TOTAL, f"{name} generated {tokens} tokens instead of {TOTAL}"
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repetitions):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def show(seconds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(value for name, value in medians.items() if name.startswith("transformers"))
    print(f"{'':42}{'median s':>9}{'best s':>9}{'tokens/s':>10}{'against the best of transformers':>34}")
    for name, median in medians.items():
        print(f"{name:42}{median:9.3f}{min(seconds[name]):9.3f}{TOTAL / median:10.0f}{best / median:33.2f}x")


if __name__ == "__main__":
    main()
