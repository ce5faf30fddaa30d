"""One trainer rank: builds its part of the run from the folder's config, trains, saves the model."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import transformers

from rondo import errors
from rondo.config import Config
from rondo.errors import Interrupted, RondoError
from rondo.launch.build import Built, build
from rondo.launch.local import share_of_cores
from rondo.loop import train
from rondo.observe.console import Console
from rondo.observe.recorder import forget_from
from rondo.stream.queue import GroupQueue


def main(config: Config, folder: Path, *, resume: bool) -> int:
    """The process's exit code; what went wrong is left in `error.json` for the launcher to say."""
    queue = GroupQueue()
    signal.signal(signal.SIGTERM, lambda number, frame: queue.close())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's business
    try:
        _train(config, folder, queue, resume=resume)
    except RondoError as error:
        traceback.print_exc()  # into the log; the launcher prints the sentence
        leave_error(folder, error)
        return error.exit_code
    return 0


def _train(config: Config, folder: Path, queue: GroupQueue, *, resume: bool) -> None:
    torch.set_num_threads(config.trainer.threads or share_of_cores(config))
    sys.setswitchinterval(0.001)  # the producer's thread must not wait long behind the training thread
    transformers.utils.logging.disable_progress_bar()
    console = Console(total=config.schedule.periods)
    console.preparing(config)
    built = build(config, folder, queue=queue, console=console)
    run = built.run
    try:
        progress = run.checkpoints.restore() if resume else None
        start = progress.period if progress else 0
        run.prompts.dataset.cursor = progress.cursor if progress else 0
        forget_from(folder, start)
        console.begin(start, run.trainer.model.policy.num_parameters(), len(run.prompts.dataset))
        run.recorder.begin()
        _loop(config, built, start)
        _save_model(config, built, folder)
        console.end(folder)
    finally:
        built.close()


def _loop(config: Config, built: Built, start: int) -> None:
    run, total = built.run, config.schedule.periods
    size, updates = config.rollout.prompts_per_period, config.schedule.updates_per_period
    try:
        train(run, start=start, total=total, prompts_per_period=size)
        run.checkpoints.save(period=total, cursor=run.prompts.dataset.cursor)
    except Interrupted:
        period, steps_into_it = divmod(run.trainer.steps, updates)
        if steps_into_it:
            raise Interrupted(
                f"stopped between two updates of period {period}; --resume goes on from the last checkpoint"
            ) from None
        run.checkpoints.save(period=period, cursor=run.prompts.dataset.cursor)
        raise Interrupted(f"stopped in period {period} and saved; go on with --resume") from None


def _save_model(config: Config, built: Built, folder: Path) -> None:
    """The final policy in Hugging Face format, in the dtype that was published."""
    aside, path = folder / ".model.partial", folder / "model"
    policy = built.run.trainer.model.policy.to(getattr(torch, config.model.dtype))
    policy.save_pretrained(aside)
    built.tokenizer.save_pretrained(aside)
    if path.exists():  # of the run that this one resumed
        path.rename(folder / ".model.old")
    os.replace(aside, path)


def leave_error(folder: Path, error: RondoError) -> None:
    record = {"type": _public(type(error)).__name__, "message": str(error)}
    (folder / "error.json").write_text(json.dumps(record) + "\n")


def _public(kind: type[RondoError]) -> type[RondoError]:
    """The class of the exception tree that a private one stands for."""
    return next(base for base in kind.__mro__ if base.__module__ == errors.__name__)
