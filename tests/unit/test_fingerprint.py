"""The hash of gradients and weights: sees every bit and place, and no sharding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from rondo.trainer.fingerprint import fingerprint
from rondo.trainer.parallel import Alone, Joined, make_mesh

SHAPES = [(5, 3), (2,), (1, 4), (8, 2, 2), (3,)]


@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), data=st.data())
def test_every_flipped_bit_changes_it(values, data):
    tensor = torch.tensor(values, dtype=torch.int64).to(torch.int32)
    place, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    other = tensor.clone()
    other[place] ^= (1 << bit) if bit < 31 else -(2**31)
    assert fingerprint([("x", tensor)], Alone()) != fingerprint([("x", other)], Alone())


def test_swapped_numbers_names_shapes_and_types_change_it():
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    told = {
        fingerprint(named, Alone())
        for named in (
            [("x", tensor)],
            [("x", tensor.flip(0))],
            [("y", tensor)],
            [("x", tensor.view(2, 2))],
            [("x", tensor.double())],
            [("x", tensor), ("y", tensor)],
        )
    }
    assert len(told) == 6
    assert fingerprint([("x", tensor.view(2, 2).t().contiguous().t())], Alone()) in told  # strides are no content


def tensors() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [(str(number), torch.randn(shape)) for number, shape in enumerate(SHAPES)]


def run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    ranks = Joined()
    found = {}
    meshes = {"sharded": make_mesh(torch.device("cpu"), size, 0), "copies": make_mesh(torch.device("cpu"), size, 2)}
    for name, mesh in meshes.items():
        placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
        spread = [(label, distribute_tensor(tensor, mesh, placements)) for label, tensor in tensors()]
        found[name] = fingerprint(spread, ranks)
    found["whole"] = fingerprint(tensors(), ranks)
    assert set(found.values()) == {fingerprint(tensors(), Alone())}, found
    Path(folder, f"done-{rank}").touch()
    dist.barrier()
    os._exit(0)  # as `leave`


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.heavy)])
def test_shards_and_copies_have_the_hash_of_the_whole(tmp_path, size):
    processes.spawn(run_rank, (size, str(tmp_path)), nprocs=size)
    assert len(list(tmp_path.glob("done-*"))) == size
