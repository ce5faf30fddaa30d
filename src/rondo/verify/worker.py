"""One process of a replay group: reads the plan, trains, and rank 0 writes the results."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from rondo.config import Config, changed, read_config
from rondo.launch.build_trainer import build_trainer
from rondo.launch.join import join
from rondo.observe.lane import Lane
from rondo.trainer.ensemble import AnyTrainer, Ensemble, follow
from rondo.trainer.parallel import Joined, leave
from rondo.trainer.trainer import Trainer
from rondo.verify.plan import Plan
from rondo.verify.prover import Prover


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    plan, config = Plan.read(folder / "plan.json"), read_config(folder / "config.json")
    ranks, device = join(config.trainer)
    torch.set_num_threads(plan.threads)
    own = build_trainer(config, Lane(), ranks=ranks, device=device)
    trainer: AnyTrainer = own
    if isinstance(ranks, Joined):
        if ranks.rank > 0:
            follow(own, ranks)
            leave(0)
        trainer = Ensemble(own=own, ranks=ranks, micro_tokens=config.trainer.micro_tokens)

    def truth() -> Trainer:
        return float64_trainer(config, device)

    results = Prover(plan=plan, config=config, trainer=trainer, ranks=ranks.size, truth=truth).prove()
    results.device = device.type
    results.write(folder / "results.json")
    trainer.close()
    if dist.is_initialized():
        leave(0)


def float64_trainer(config: Config, device: torch.device) -> Trainer:
    """Computes in float64 what the run computes in its own way; each pass's gradient is rounded once, at its end."""
    plain = changed(changed(config, "trainer.compile", False), "trainer.offload", False)
    return build_trainer(plain, Lane(), device=device, dtype=torch.float64)
