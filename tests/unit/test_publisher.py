"""The ordering contract of a publication, with hand-written receivers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rondo.errors import PublicationError
from rondo.observe.lane import Lane
from rondo.types import Confirmation
from rondo.weights.checksum import checksum, tensor_sum
from rondo.weights.files import copy_into, read_weights, write_weights
from rondo.weights.publisher import Publisher

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


class FakeReceiver:
    def __init__(self, name: str, log: list[str], *, confirms: str = "") -> None:
        self.url = name
        self.log = log
        self.confirms = confirms
        self.held: dict[str, torch.Tensor] = {}

    async def _note(self, what: str) -> None:
        await asyncio.sleep(0.001 if self.url == "slow" else 0)
        self.log.append(f"{what} {self.url}")

    async def pause(self) -> None:
        await self._note("pause")

    async def start_update(self) -> None:
        self.info: dict[str, Any] = {}

    async def update(self, info: Mapping[str, Any]) -> None:
        self.info = dict(info)
        await self._note("load")
        self.held = read_weights(Path(info["path"]))

    async def finish_update(self) -> Confirmation:
        announced = self.info["checksum"]
        return Confirmation(
            engine=self.url, boot="b", version=self.info["version"], checksum=self.confirms or announced
        )

    async def reset_prefix_cache(self) -> None:
        await self._note("reset")

    async def resume(self) -> None:
        await self._note("resume")


def publisher(folder: Path, *receivers: FakeReceiver) -> Publisher:
    return Publisher(folder=folder, weights=lambda: WEIGHTS, receivers=lambda: receivers, call=asyncio.run, lane=Lane())


def test_no_engine_passes_a_stage_before_all_have_reached_it(tmp_path):
    log: list[str] = []
    publisher(tmp_path, FakeReceiver("fast", log), FakeReceiver("slow", log)).publish(version=1)
    stages = [line.split()[0] for line in log]
    assert stages == ["pause", "pause", "load", "load", "reset", "reset", "resume", "resume"]


def test_engines_receive_the_very_bits(tmp_path):
    receiver = FakeReceiver("fast", [])
    publisher(tmp_path, receiver).publish(version=1)
    assert checksum(sorted(receiver.held.items())) == checksum(WEIGHTS.items())


def test_nobody_resumes_when_one_engine_confirms_something_else(tmp_path):
    log: list[str] = []
    with pytest.raises(PublicationError, match="engine liar holds version 1 with checksum 0"):
        publisher(tmp_path, FakeReceiver("fast", log), FakeReceiver("liar", log, confirms="0")).publish(version=1)
    assert not [line for line in log if line.startswith("resume")]


def test_the_last_publication_is_kept_until_the_next_is_confirmed(tmp_path):
    receiver = FakeReceiver("fast", [])
    published = publisher(tmp_path, receiver)
    published.publish(version=1)
    published.publish(version=2)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002.safetensors"]
    receiver.confirms = "wrong"
    with pytest.raises(PublicationError):
        published.publish(version=3)
    assert "00000002.safetensors" in [path.name for path in tmp_path.iterdir()]
    published.close()
    assert not tmp_path.exists()


@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), place=st.data(), bit=st.integers(0, 31)
)
def test_every_flipped_bit_changes_the_checksum(words, place, bit):
    tensor = torch.tensor(words, dtype=torch.int32)
    index = place.draw(st.integers(0, len(words) - 1))
    changed = tensor.clone()
    changed[index] ^= -(2**31) if bit == 31 else 2**bit
    assert tensor_sum(tensor) != tensor_sum(changed)


def test_swapped_words_names_shapes_and_types_change_the_checksum():
    base = torch.tensor([1.0, 2.0, 3.0, 4.0])
    variants = [
        ("a", base),
        ("b", base),
        ("a", base.flip(0)),
        ("a", base.reshape(2, 2)),
        ("a", base.to(torch.bfloat16)),
    ]
    assert len({checksum([variant]) for variant in variants}) == len(variants)


def test_weights_of_other_names_or_shapes_are_refused():
    held = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(PublicationError, match="lacks 1 of the engine's tensors, b first"):
        copy_into(held, [("a", torch.ones(2))])
    with pytest.raises(PublicationError, match="published a has shape"):
        copy_into(held, [("a", torch.ones(3))])
    with pytest.raises(PublicationError, match="no such tensor"):
        copy_into(held, [("c", torch.ones(2))])


def test_a_file_is_whole_or_absent(tmp_path):
    with pytest.raises(PublicationError, match=r"GB are free there"):
        write_weights(tmp_path, 1, {"a": "not a tensor"})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())
