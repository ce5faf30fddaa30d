"""What a trainer is made of on disk: weights and optimizer state by parameter name, in torch's distributed format.

Every rank writes its own shards, and may read those of any number of ranks; all lie in rank 0's folder. (Torch's
`.metadata` file there is a pickle that torch writes and reads itself.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rondo.trainer.carry import readable, written
from rondo.trainer.parallel import Joined, Ranks

Named = Sequence[tuple[str, torch.nn.Parameter]]

MODEL, OPTIMIZER = "model|", "optimizer|"


def write_state(folder: Path, named: Named, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Called on every rank."""
    tensors: dict[str, torch.Tensor] = {f"{MODEL}{name}": parameter.detach() for name, parameter in named}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER}{name}|{key}"] = value
    where = written(folder, ranks) if isinstance(ranks, Joined) else nullcontext(folder)
    with where as own, _alone_without_a_warning() as alone:
        save(tensors, checkpoint_id=own, no_dist=alone)


def read_state(folder: Path, named: Named, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Called on every rank; fills the parameters in place and replaces the optimizer's state."""
    with readable(folder, ranks) if isinstance(ranks, Joined) else nullcontext(folder) as own:
        _read(own, named, optimizer)


def _read(folder: Path, named: Named, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(named)
    written = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors: dict[str, torch.Tensor] = {f"{MODEL}{name}": parameter.detach() for name, parameter in named}
    optimizer.state.clear()
    for label, what in written.items():
        if label.startswith(OPTIMIZER):
            name, key = label.removeprefix(OPTIMIZER).rsplit("|", 1)
            parameter = parameters[name]
            assert isinstance(what, TensorStorageMetadata)
            scalar = not what.size  # Adam's step count lives on the CPU
            held = torch.zeros((), dtype=what.properties.dtype) if scalar else torch.zeros_like(parameter.detach())
            tensors[label] = optimizer.state[parameter][key] = held
    with _alone_without_a_warning() as alone:
        load(tensors, checkpoint_id=folder, no_dist=alone)


@contextmanager
def _alone_without_a_warning() -> Iterator[bool]:
    """Whether there is no process group, which torch would wonder about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()
