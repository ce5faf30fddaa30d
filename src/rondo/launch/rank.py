"""One trainer rank: builds its part of the run from the folder's config and trains; rank 0 leads, the others follow."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from rondo import errors
from rondo.config import Config
from rondo.errors import Interrupted, RondoError, StorageError, UserError
from rondo.launch.build import Built, build
from rondo.launch.build_trainer import build_trainer, published_weights, saved_state
from rondo.launch.commands import share_of_cores
from rondo.launch.join import join
from rondo.launch.local import LOST_PEER
from rondo.launch.resume import Replay, journal_header
from rondo.loop import train
from rondo.observe.console import Console
from rondo.observe.diagnosis import Waits, Watch, listen
from rondo.observe.lane import Lane
from rondo.observe.recorder import forget_from, told_periods
from rondo.rollout.journal import RecordedPeriod, forget_periods
from rondo.storage import storage_sentence
from rondo.stream.queue import GroupQueue
from rondo.trainer.ensemble import follow
from rondo.trainer.parallel import Alone, Joined, leave

LAST_WORDS = 4096  # bytes kept free for an error's sentence


def main(config: Config, folder: Path, *, resume: bool, launched: bool = True) -> int:
    """The process's exit code; what went wrong is left in `error.json` for the launcher to say.

    Not `launched` (torchrun): it is said here too, and Ctrl-C comes to this process.
    """
    queue, signals = GroupQueue(), listen()
    signal.signal(signal.SIGTERM, lambda number, frame: queue.close())  # only rank 0 looks at it: it lets the others go
    signal.signal(signal.SIGINT, signal.SIG_IGN if launched else signal.getsignal(signal.SIGTERM))
    with suppress(OSError):  # what is wrong with it will be said by whoever needs it first
        _last_words(folder).write_bytes(b" " * LAST_WORDS)
    try:
        _train(config, folder, queue, signals, resume=resume)
        code = 0
    except Exception as error:
        with suppress(OSError):  # a full disk takes no more
            if launched or not isinstance(error, UserError):
                traceback.print_exc()  # into the log; the launcher prints the sentence
        code = _exit_code(folder, error)
    _last_words(folder).unlink(missing_ok=True)
    if not launched and (path := folder / "error.json").exists():
        sys.stderr.write(f"error: {json.loads(path.read_text())['message']}\n")
    if dist.is_initialized() or not launched:
        leave(code)
    return code


def _exit_code(folder: Path, error: Exception) -> int:
    if not isinstance(error, RondoError) and (sentence := storage_sentence(folder, error)):
        error = StorageError(sentence)
    if isinstance(error, RondoError):
        leave_error(folder, error)
        return error.exit_code
    # The place in its own source that gloo names when a peer is gone.
    return LOST_PEER if "gloo/transport" in str(error) else 1


def _train(config: Config, folder: Path, queue: GroupQueue, signals: socket.socket, *, resume: bool) -> None:
    transformers.utils.logging.disable_progress_bar()
    ranks, device = join(config.trainer)
    torch.set_num_threads(_threads(config, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))))
    if isinstance(ranks, Joined) and ranks.rank > 0:
        follow(build_trainer(config, Lane(), ranks=ranks, device=device), ranks)
    else:
        lead(config, folder, queue, ranks, device, resume=resume, signals=signals)


def _threads(config: Config, ranks: int) -> int:
    """Exact sums are the same for any number of ranks: what else decides about bits must not depend on it."""
    if config.trainer.accumulation == "exact":
        return config.trainer.threads or 1
    return config.trainer.threads or share_of_cores(config, ranks)


def lead(
    config: Config,
    folder: Path,
    queue: GroupQueue,
    ranks: Alone | Joined,
    device: torch.device,
    *,
    resume: bool,
    signals: socket.socket | None = None,
) -> None:
    """Rank 0's life, in a process of its own or in that of a test."""
    sys.setswitchinterval(0.001)  # the producer's thread must not wait long behind the training thread
    (folder / "logs").mkdir(exist_ok=True)  # the launcher's, where there is one
    console = Console(
        total=config.schedule.periods,
        synchronous=config.schedule.mode == "synchronous",
        ranks=config.trainer.ranks,
    )
    console.preparing(config)
    waits = Waits()
    watch = Watch(waits=waits, silence_seconds=config.launch.silence_seconds, say=console.diagnosis, signals=signals)
    watch.start()
    built = None
    try:
        with waits.awaiting("model, reward workers and engines to be ready", "this run's processes"):
            built = build(config, folder, queue=queue, console=console, waits=waits, ranks=ranks, device=device)
        run = built.run
        if not resume:
            forget_periods(folder, 0)  # of one that ended before its first line
        start = _resumed(config, built, folder, queue, console, waits, ranks.size) if resume else 0
        forget_from(folder, start)
        console.begin(start, built.own.model.policy.num_parameters(), len(run.prompts.dataset))
        run.recorder.begin(start)
        _loop(config, built, start)
        _save_model(config, built, folder)
        run.trainer.close()
        console.end(folder)
    finally:
        console.close()
        if built is not None:
            built.close()
        watch.close()


def _resumed(
    config: Config, built: Built, folder: Path, queue: GroupQueue, console: Console, waits: Waits, ranks: int
) -> int:
    """The period to go on with: trainer and data stand at its start, and what was settled of it is at hand."""
    run = built.run
    progress = run.checkpoints.restore()
    run.prompts.dataset.cursor = progress.cursor if progress else 0
    forget_from(folder, sys.maxsize)  # nothing but torn lines

    def again(period: RecordedPeriod) -> None:
        """Killed between the two, a run may have left a whole journal and not the lines that follow from it."""
        assert period.end is not None
        if period.period not in told_periods(folder, "certificate.jsonl"):
            run.ledger.write(period.end)
        if period.period not in told_periods(folder, "metrics.jsonl"):
            forget_from(folder, period.period, ["samples.jsonl", "spans.jsonl"])
            for group, kept in period.settled:
                run.recorder.saw(group, kept)
            run.recorder.finish(period.period)
        run.checkpoints.finish(period.period)

    def check() -> None:
        queue.raise_if_over()
        waits.moved()

    replay = Replay(
        config=config,
        folder=folder,
        header=journal_header(config, ranks),
        trainer=built.trainer,
        prompts=run.prompts,
        promised=built.own.device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
        say=console.warn,
        check=check,
        on_period=again,
    )
    try:
        found = replay.run(progress.period if progress else 0)
    except Interrupted:
        run.trainer.close()
        raise Interrupted("stopped while it trained the journalled periods again; go on with --resume") from None
    forget_periods(folder, found.start + (found.interrupted is not None))
    if found.interrupted is not None and built.journal is not None:
        built.recalled.hold(found.interrupted)
        built.journal.carry(found.interrupted)
    console.resumed(progress.period if progress else None, found.replayed, found.interrupted)
    return found.start


def _loop(config: Config, built: Built, start: int) -> None:
    run, total = built.run, config.schedule.periods
    size, updates = config.rollout.prompts_per_period, config.schedule.updates_per_period
    try:
        train(run, start=start, total=total, prompts_per_period=size)
        run.checkpoints.save(period=total, cursor=run.prompts.dataset.cursor)
    except Interrupted:
        period, steps_into_it = divmod(run.trainer.steps, updates)
        if steps_into_it:
            run.trainer.close()
            raise Interrupted(
                f"stopped between two updates of period {period}; --resume goes on from the last checkpoint"
            ) from None
        saved = run.checkpoints.save(period=period, cursor=run.prompts.dataset.cursor)
        run.trainer.close()
        how = "and saved; go on with --resume" if saved else "without a checkpoint (trainer.keep_checkpoints = 0)"
        raise Interrupted(f"stopped in period {period} {how}") from None


def _save_model(config: Config, built: Built, folder: Path) -> None:
    """The final policy in Hugging Face format, in the dtype that was published."""
    aside, path = folder / ".model.partial", folder / "model"
    policy = built.own.model.policy
    weights = published_weights(built.run.trainer, config.model.dtype)
    policy.save_pretrained(aside, state_dict=saved_state(policy, weights))
    described = json.loads((aside / "config.json").read_text())
    (aside / "config.json").write_text(json.dumps(described | {"dtype": config.model.dtype}, indent=2) + "\n")
    built.tokenizer.save_pretrained(aside)
    shutil.rmtree(path, ignore_errors=True)  # of the run that this one resumed
    os.replace(aside, path)


def leave_error(folder: Path, error: RondoError) -> None:
    record = {"type": _public(type(error)).__name__, "message": str(error)}
    aside = _last_words(folder)
    with aside.open("r+b" if aside.exists() else "wb") as file:  # over its own room: a full disk has no other
        file.write(json.dumps(record).encode().ljust(LAST_WORDS) + b"\n")
    os.replace(aside, folder / "error.json")


def _last_words(folder: Path) -> Path:
    return folder / f".error-{os.getpid()}.partial"  # several ranks may have the same to say


def _public(kind: type[RondoError]) -> type[RondoError]:
    """The class of the exception tree that a private one stands for."""
    return next(base for base in kind.__mro__ if base.__module__ == errors.__name__)
