"""A whole run in this process, on the real engine in its own; with a witness of everything that was trained."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import torch

from rondo.config import parse_config
from rondo.launch.build import build
from rondo.launch.build_trainer import build_trainer
from rondo.loop import train
from rondo.observe.console import Console
from rondo.observe.lane import Lane
from rondo.rollout.journal import forget_periods, read_period
from rondo.stream.queue import GroupQueue
from rondo.trainer.ensemble import AnyTrainer
from rondo.trainer.trainer import Trainer
from rondo.types import Group, MicroBatch
from rondo.verify.account import all_violations
from rondo.verify.certificate import Certificate, judge
from rondo.verify.plan import Plan
from rondo.verify.prover import Prover
from rondo.verify.start import find_start
from rondo.verify.worker import float64_trainer


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
    forget_periods(folder, 0)
    config.write(folder / "config.json")
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


def verified_here(folder: Path, **changes: object) -> Certificate:
    """What `rondo verify` finds about a recorded run, computed in this process, on one rank."""
    config = parse_config(json.loads((folder / "config.json").read_text()))
    start = find_start(folder, first=None, count=None)
    scratch = folder / f"scratch-{len(list(folder.glob('scratch-*')))}"
    scratch.mkdir()
    plan = Plan(
        run=str(folder),
        scratch=str(scratch),
        start=start.path,
        steps=start.steps,
        chain=start.chain,
        checked=start.wanted,
        threads=1,
        leading=True,
        leading_ranks=1,
        trials=2,
        packings=(30, 10**6),
        truth=True,
        synchronous_chain=True,
    )
    trainer = build_trainer(config, Lane())
    plan = dataclasses.replace(plan, **changes)  # type: ignore[arg-type]
    results = Prover(
        plan=plan,
        config=config,
        trainer=trainer,
        ranks=1,
        truth=lambda: float64_trainer(config, torch.device("cpu")),
    ).prove()
    results.device = "cpu"
    periods = [read_period(folder, period) for period in start.wanted]
    found = all_violations(config, periods)
    return judge(folder=folder, config=config, periods=periods, violations=found, results=results, seconds=0.0)
