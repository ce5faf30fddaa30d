"""How a trainer rank finds the others, and which device is its own.

The launcher says by environment which of how many ranks a process is, and names a file in the run's folder where they
meet; torchrun, and the Ray launcher, say the same in torchrun's words (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rondo.config.trainer import TrainerConfig
from rondo.errors import ConfigError
from rondo.launch.addresses import interface_of, own_address
from rondo.launch.processes import MEETING
from rondo.trainer.parallel import Alone, Joined


def join(config: TrainerConfig) -> tuple[Alone | Joined, torch.device]:
    """Returns when all ranks are there. One rank alone makes no process group."""
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = device_of(config.device, local if size > 1 else None)
    if size == 1:
        return Alone(), device
    if config.shard and size % config.shard:
        raise ConfigError(f"trainer.shard = {config.shard} does not divide the {size} trainer ranks into whole copies")
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    meeting = os.environ.get(MEETING)
    if not meeting:
        _name_interface(os.environ["MASTER_ADDR"])
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}" if meeting else "env://",
        rank=int(os.environ["RANK"]),
        world_size=size,
    )
    return Joined(), device


def _name_interface(leader: str) -> None:
    """Tell gloo by which network interface the others are reached. It would take the one that this machine's name
    stands for, which on many machines is loopback."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(own_address(leader))):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def device_of(name: str, number: int | None = None) -> torch.device:
    """As configured, else the accelerator, else the CPU; with several ranks, the one with this number."""
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found or torch.device("cpu")
    else:
        device = torch.device(name)
    if number is None or device.type == "cpu":
        return device
    if number >= torch.accelerator.device_count():
        raise ConfigError(
            f"trainer.ranks asks for a device of type {device.type} with number {number}, but there are "
            f"{torch.accelerator.device_count()}: use fewer ranks on this machine"
        )
    return torch.device(device.type, number)


def limit_memory(device: torch.device, share: float) -> None:
    """Take at most this share of the device's memory (0: any), which must be free: an engine has the rest."""
    if not share or device.type == "cpu":
        return
    module = getattr(torch, device.type)  # not every maker's calls are in torch.accelerator yet
    number = torch.accelerator.current_device_index() if device.index is None else device.index
    free, total = module.mem_get_info(number)
    if free < share * total:
        raise ConfigError(
            f"trainer.memory_share = {share} of {total / 2**30:.0f} GiB are not free on {device}: only "
            f"{free / 2**30:.0f} GiB are; lower it or engines.memory_share"
        )
    module.set_per_process_memory_fraction(share, number)
