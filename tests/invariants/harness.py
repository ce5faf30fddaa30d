"""A whole run in this process, on the real engine in its own; with a witness of everything that was trained."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from rondo.config import parse_config
from rondo.launch.build import build
from rondo.loop import train
from rondo.observe.console import Console
from rondo.stream.queue import GroupQueue
from rondo.trainer.ensemble import AnyTrainer
from rondo.trainer.trainer import Trainer
from rondo.types import Group, MicroBatch


class Witness:
    """The trainer, with its micro-batches written down."""

    def __init__(self, trainer: AnyTrainer, own: Trainer) -> None:
        self.trainer = own
        self._called = trainer
        self.micros: list[MicroBatch] = []
        self.started: list[float] = []

    def begin_period(self) -> None:
        self._called.begin_period()

    def accumulate(self, micro: MicroBatch) -> None:
        self.micros.append(micro)
        self.started.append(time.monotonic())
        self._called.accumulate(micro)

    def step(self) -> None:
        self._called.step()

    @property
    def groups(self) -> list[Group]:
        """Every group that was trained or counted, once per appearance."""
        found = [part.group for micro in self.micros for part in micro.parts if part.first == 0]
        return found + [group for micro in self.micros for group in micro.skipped]


def run_here(tree: dict[str, dict[str, object]]) -> tuple[list[torch.Tensor], Witness]:
    """Final weights, and the witness."""
    config = parse_config(tree)
    folder = Path(config.run.path)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    built = build(config, folder, queue=GroupQueue(), console=Console(total=config.schedule.periods))
    witness = Witness(built.run.trainer, built.own)
    run = dataclasses.replace(built.run, trainer=witness)  # type: ignore[arg-type]
    try:
        train(
            run,
            start=0,
            total=config.schedule.periods,
            prompts_per_period=config.rollout.prompts_per_period,
        )
    finally:
        built.close()
    return [parameter.detach().clone() for parameter in witness.trainer.model.policy.parameters()], witness
