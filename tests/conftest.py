"""Shared by all tests: tiny models, hand-made groups, one real engine process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from rondo.launch.cpu import CAP, WITHOUT_AMX
from rondo.types import Answer, Group, Prompt, Response

torch.set_num_threads(1)


def survive_bfloat16() -> None:
    """The library behind bfloat16 products looks at its setting once, at the first of them: for this process alone."""
    if CAP not in os.environ:
        os.environ[CAP] = WITHOUT_AMX
        torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
        del os.environ[CAP]


survive_bfloat16()
logging.getLogger("transformers").setLevel(logging.ERROR)


def make_group(
    *,
    index: int = 0,
    period: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    responses: Sequence[Sequence[int]] = ((4, 5), (6,)),
    advantages: Sequence[float] | None = None,
    version: int | None = None,
) -> Group:
    """A group as the producer would have made it."""
    held = period if version is None else version
    return Group(
        period=period,
        index=index,
        prompt=Prompt(ordinal=index, text="", token_ids=tuple(prompt), columns={}),
        seed=index,
        answer=Answer(
            engine="fake",
            boot="boot",
            version=(held, held),
            responses=tuple(
                Response(token_ids=tuple(ids), logps=(-1.0,) * len(ids), stopped=True) for ids in responses
            ),
        ),
        rewards=(0.0,) * len(responses),
        advantages=tuple(advantages)
        if advantages is not None
        else tuple(float(n) - 0.5 for n in range(len(responses))),
        asked_at=0.0,
        answered_at=0.0,
        scored_at=0.0,
    )


def start_engine(announce: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """`rondo serve` in its own process; its address once it is ready."""
    command = [sys.executable, "-m", "rondo", "serve", "--announce", str(announce), "--threads", "1", *options]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while not announce.exists():
        assert process.poll() is None, "the engine ended before it was ready"
        time.sleep(0.05)
    return process, json.loads(announce.read_text())["url"]


@pytest.fixture(scope="session")
def arithmetic() -> Path:
    """The folder of the model that ships with the package."""
    from rondo.config import ASSETS

    return ASSETS / "arithmetic"


@pytest.fixture(scope="session")
def engine(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real, batch-invariant engine in its own process."""
    announce = tmp_path_factory.mktemp("engine") / "engine.json"
    options = ["--model", str(arithmetic), "--batch-invariant", "--slots", "8", "--max-model-len", "32"]
    process, url = start_engine(announce, *options)
    yield url
    process.terminate()
    process.wait(timeout=20)


@pytest.fixture
def tree(engine: str, tmp_path: Path) -> Callable[..., dict[str, dict[str, object]]]:
    """A small config as a tree, on the real engine; keywords replace whole keys: schedule__mode="synchronous"."""

    def build(**changes: object) -> dict[str, dict[str, object]]:
        base: dict[str, dict[str, object]] = {
            "run": {"seed": 7, "folder": str(tmp_path / "run")},
            "model": {"path": "rondo:arithmetic"},
            "data": {"train": "rondo:arithmetic/train.jsonl"},
            "rollout": {"prompts_per_period": 10, "group_size": 4, "max_new_tokens": 6},
            "schedule": {"periods": 2},
            "trainer": {"learning_rate": 1e-4, "micro_tokens": 48, "threads": 1},
            "engines": {"urls": [engine]},
            "rewards": {"functions": ["rondo.rewards.arithmetic:correct"]},
        }
        for name, value in changes.items():
            section, key = name.split("__")
            base.setdefault(section, {})[key] = value
        return base

    return build
