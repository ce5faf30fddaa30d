"""The engines that the contract is held against: each backend, with tied and with untied embeddings."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rondo.config import ASSETS
from rondo.engines.client import HttpEngine
from tests.vllm import EAGER, Server, require_vllm

T = TypeVar("T")
LENGTH = 512
VLLM = pytest.param("vllm", marks=pytest.mark.heavy)


@dataclass(kw_only=True)
class Subject:
    """A running engine, and the model that it holds at first."""

    server: Server
    backend: str
    model: PreTrainedModel
    folder: Path
    version: int = -1  # last published

    def drive(self, scenario: Callable[[HttpEngine], Awaitable[T]]) -> T:
        async def main() -> T:
            async with aiohttp.ClientSession() as session:
                return await scenario(HttpEngine(self.server.url, session, seconds=120))

        return asyncio.run(main())


def make_model(folder: Path, *, tied: bool) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(5)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "arithmetic" / name, folder / name)
    return model


class Subjects:
    """Started at the first wish for one of a backend: vLLM's two load side by side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[tuple[str, bool], Subject] = {}

    def get(self, backend: str, *, tied: bool) -> Subject:
        if (backend, tied) not in self._held:
            if backend == "vllm":
                require_vllm()
            for kind in (True, False):
                self._held[backend, kind] = self._start(backend, kind)
        return self._held[backend, tied]

    def end(self) -> None:
        for subject in self._held.values():
            subject.server.end()

    def _start(self, backend: str, tied: bool) -> Subject:
        folder = self._folder / f"{backend}-{tied}"
        folder.mkdir()
        model = make_model(folder / "model", tied=tied)
        options = ["--backend", backend, "--model", str(folder / "model"), "--slots", "16"]
        options += ["--max-model-len", str(LENGTH), *([EAGER] if backend == "vllm" else [])]
        return Subject(server=Server(folder, *options), backend=backend, model=model, folder=folder)


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    held = Subjects(tmp_path_factory.mktemp("contract"))
    yield held
    held.end()


@pytest.fixture(params=["embedded", VLLM])
def subject(subjects: Subjects, request: pytest.FixtureRequest) -> Subject:
    """One with tied embeddings."""
    return subjects.get(request.param, tied=True)


@pytest.fixture(params=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tied")


@pytest.fixture(params=["embedded", VLLM])
def any_subject(subjects: Subjects, tied: bool, request: pytest.FixtureRequest) -> Subject:
    return subjects.get(request.param, tied=tied)
