"""Compiled layers: the same log-probs and gradients, and nothing compiled anew when lengths change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch._dynamo.utils import counters

from rondo.trainer.layers import checkpoint_layers
from rondo.trainer.lora import LoRASettings
from rondo.trainer.parallel import Joined, leave, make_mesh, whole
from tests.trainers import gradient_after, make_trainer, micros_of, random_groups

pytestmark = [
    pytest.mark.heavy,  # the compiler takes its time
    pytest.mark.filterwarnings("ignore"),  # and has its own warnings
]

KINDS: dict[str, dict[str, Any]] = {
    "three models": {"keep_old": True, "kl": 0.1, "entropy": 0.1},
    "separate rows": {"attention": "separate"},
    "adapters": {"keep_old": True, "kl": 0.1, "lora": LoRASettings(rank=2, alpha=4.0)},
    "bfloat16": {"compute": torch.bfloat16},
}


def apart(found, expected):
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        ("three models", False),
        ("bfloat16", False),
        pytest.param("separate rows", True, marks=pytest.mark.long),
        pytest.param("adapters", True, marks=pytest.mark.long),
    ],
)
def test_compiled_layers_give_the_gradient_of_plain_ones_and_are_compiled_once(kind, recompute):
    torch._dynamo.reset()
    options = {"dtype": torch.float32, **KINDS[kind]}
    plain, compiled = make_trainer(**options), make_trainer(**options, compiled=True, multiple=16)
    if recompute:
        checkpoint_layers(compiled.model._policy_scorer.model)
    sizes, graphs = set(), []
    for seed in range(4):
        micros = micros_of(random_groups(5, seed=seed), 90)
        sizes |= {compiled._layout(micro.parts).tokens_T.numel() for micro in micros}
        expected, found = (gradient_after(trainer, micros) for trainer in (plain, compiled))
        assert apart(found, expected) < (0.1 if kind == "bfloat16" else 1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(sizes) > 2
    assert all(size % 16 == 0 for size in sizes)
    assert graphs[0] > 0
    assert graphs[1:] == graphs[:1] * 3  # the first update is the warm-up


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks, micros = Joined(), micros_of(random_groups(8), 60)
    trainer = make_trainer(
        dtype=torch.float32, ranks=ranks, mesh=make_mesh(torch.device("cpu"), 2, 0), compiled=True, multiple=16
    )
    found = [whole(gradient) for gradient in gradient_after(trainer, micros[rank : len(micros) // 2 * 2 : 2])]
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.barrier()
    leave(0)


def test_compiled_layers_can_be_sharded(tmp_path):
    processes.spawn(run_rank, (tmp_path,), nprocs=2)
    micros = micros_of(random_groups(8), 60)
    alone = make_trainer(dtype=torch.float32)
    expected = gradient_after(alone, micros[: len(micros) // 2 * 2])
    assert apart(torch.load(tmp_path / "gradients.pt"), expected) < 1e-5
