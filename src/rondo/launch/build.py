"""Builds one rank's run from the config: the only place where all parts are named together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from rondo.config import Config, asset_or_path
from rondo.engines.bearer import run_token
from rondo.engines.pool import EnginePool
from rondo.errors import StorageError
from rondo.launch.autoscale import Autoscaler, Rule
from rondo.launch.build_ledger import build_ledger
from rondo.launch.build_loader import build_loader
from rondo.launch.build_observe import build_watch
from rondo.launch.build_outside import Outside, build_outside
from rondo.launch.build_producer import producer_settings
from rondo.launch.build_publisher import build_publisher
from rondo.launch.build_trainer import build_trainer
from rondo.launch.control import Control
from rondo.launch.fleet import Fleet
from rondo.launch.join import device_of
from rondo.launch.waits import watch_trainer
from rondo.loop import Run
from rondo.observe.console import Console
from rondo.observe.diagnosis import Waits
from rondo.observe.lane import Lane
from rondo.observe.ledger import Ledger
from rondo.observe.recorder import Recorder
from rondo.observe.sinks import Sinks
from rondo.observe.spans import SpanBook
from rondo.prompts.dataset import Dataset, read_rows
from rondo.prompts.stream import PromptStream
from rondo.prompts.template import Template
from rondo.rewards.runner import RewardRunner
from rondo.rollout.background import Background
from rondo.rollout.evaluation import Evaluation
from rondo.rollout.journal import Journal
from rondo.rollout.producer import Producer
from rondo.rollout.recall import Recalled
from rondo.stream.queue import GroupQueue
from rondo.trainer.accounted import Accounted
from rondo.trainer.checkpoint import Checkpoints
from rondo.trainer.ensemble import AnyTrainer, Ensemble
from rondo.trainer.logprobs import warm_up
from rondo.trainer.parallel import Alone, Joined
from rondo.trainer.trainer import Trainer
from rondo.types import Group
from rondo.weights.probe import Probe
from rondo.weights.publisher import Publisher


@dataclass(frozen=True, kw_only=True)
class Built:
    """A run and what must be closed after it."""

    run: Run
    own: Trainer  # this rank's
    trainer: AnyTrainer  # all ranks', unaccounted
    journal: Journal | None
    recalled: Recalled
    tokenizer: Any
    outside: Outside
    control: Control
    autoscaler: Autoscaler | None

    def close(self) -> None:
        outside = self.outside
        outside.sinks.close()
        if self.autoscaler is not None:
            self.autoscaler.close()
        outside.background.call(self.control.close())
        outside.background.call(outside.fleet.keeper.close())
        self.run.producer.abandon()  # else its requests would fail, loudly, when their connections close
        self.run.publisher.close()
        outside.close()
        if self.journal is not None:  # what has not been written yet was not trained: a full disk said so already
            with suppress(StorageError):
                self.journal.close()


def build(
    config: Config,
    folder: Path,
    *,
    queue: GroupQueue,
    console: Console,
    waits: Waits | None = None,
    ranks: Alone | Joined | None = None,
    device: torch.device | None = None,
) -> Built:
    """Rank 0's part: all but the other ranks' trainers."""
    lane, waits = Lane("preparing"), waits or Waits()
    tokenizer = AutoTokenizer.from_pretrained(asset_or_path(config.model.path))
    outside = build_outside(config, folder, queue=queue, console=console, waits=waits)
    background, scorer, fleet, pool = outside.background, outside.scorer, outside.fleet, outside.fleet.pool
    spans = SpanBook(folder, seats=lambda: [(seat.engine.url, seat.lane) for seat in list(pool.seats)])

    def engines() -> int:
        with waits.awaiting("a sign that they are ready", "the engines"), console.step("waiting for the engines"):
            return background.call(fleet.gather())

    warming = _warm_up(config, device or device_of(config.trainer.device))
    # An engine that measures the memory it may use must not see the trainer take some at the same time.
    context = engines() if config.shares_device else 0
    with console.step("loading the model"):  # else while the engines start
        own = build_trainer(config, lane, ranks=ranks, device=device, on_fallback=console.warn)
    trainer: AnyTrainer = own
    if isinstance(ranks, Joined):
        trainer = Ensemble(own=own, ranks=ranks, micro_tokens=config.trainer.micro_tokens)
    ledger, journal = build_ledger(
        config,
        folder,
        ranks.size if ranks else 1,
        published=lambda: publisher.confirmed,
        measured=lambda: trainer.tally.read(),
        retried=lambda: pool.retries + pool.moved,
    )
    watch_trainer(lane, ranks.size if ranks else 1, lambda: ledger.events, waits)
    recalled = Recalled()
    context = context or engines()
    template = Template(tokenizer=tokenizer, max_new_tokens=config.rollout.max_new_tokens, max_context=context)
    prompts = _prompts(config, config.data.train, template, shuffle=config.data.shuffle)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    autoscaler = _autoscaler(config, folder, console.warn)

    recorder = Recorder(
        folder=folder,
        lane=lane,
        spans=spans,
        trainer_tally=lambda: trainer.tally,
        counters=lambda: {
            **_counters(pool, scorer, producer, background, ledger, publisher, probe),
            "console_seconds": console.take_seconds(),
        },
        decode=decode,
        show=_shown(console, outside.sinks, autoscaler),
        samples=config.observe.samples,
        other_ranks=own.take_others,
    )

    def settled(group: Group, kept: bool) -> None:
        ledger.group(group, kept)
        recorder.saw(group, kept)

    producer = Producer(
        background=background,
        pool=pool,
        scorer=scorer,
        queue=queue,
        decode=decode,
        settings=producer_settings(config, own.model.policy, tokenizer),
        accounts=ledger,
        recall=recalled,
        waits=waits,
        on_group=settled,
        on_shortfall=console.warn,
    )
    publisher, probe = build_publisher(
        config,
        folder,
        pool=pool,
        trainer=trainer,
        device=own.device,
        background=background,
        probe_text=prompts.ahead()(0).token_ids,
        warn=console.warn,
        lane=lane,
    )
    console.watch(build_watch(config, lane, spans, recorder, pool, lambda: publisher.confirmed))
    control = _attend(config, folder, fleet, publisher, background, queue)
    run = Run(
        prompts=prompts,
        producer=producer,
        loader=build_loader(config, queue, lane, ranks.size if ranks else 1, waits),
        trainer=Accounted(trainer, ledger, before_step=publisher.may_move),
        publisher=publisher,
        ledger=ledger,
        evaluation=_evaluation(config, producer, template, lane, recorder),
        recorder=recorder,
        checkpoints=_checkpoints(config, folder, trainer, prompts, lane),
    )
    warming.join()
    return Built(
        run=run,
        own=own,
        trainer=trainer,
        journal=journal,
        recalled=recalled,
        tokenizer=tokenizer,
        outside=outside,
        control=control,
        autoscaler=autoscaler,
    )


def _counters(
    pool: EnginePool,
    scorer: RewardRunner,
    producer: Producer,
    background: Background,
    ledger: Ledger,
    publisher: Publisher,
    probe: Probe,
) -> dict[str, float]:
    return {
        "request_retries": pool.retries,
        "requests_moved": pool.moved,
        "engines_ready": len(pool.ready),
        "reward_failures": scorer.failures,
        "reward_retries": scorer.retries,
        "candidates_unneeded": producer.unneeded,
        "producer_cpu_seconds": background.cpu_seconds(),
        "journal_seconds": ledger.take_seconds(),
        "publication_bytes": publisher.bytes,
        "probe_gap": probe.gap,
    }


def _checkpoints(config: Config, folder: Path, trainer: AnyTrainer, prompts: PromptStream, lane: Lane) -> Checkpoints:
    return Checkpoints(
        folder=folder / "checkpoints",
        trainer=trainer,
        cursor=lambda: prompts.dataset.cursor,
        every=config.trainer.checkpoint_every,
        keep=config.trainer.keep_checkpoints,
        lane=lane,
    )


def _warm_up(config: Config, device: torch.device) -> Thread:
    """Compiles what the first step needs while engines start and weights are read."""
    text = AutoConfig.from_pretrained(asset_or_path(config.model.path)).get_text_config()
    settings = {
        "tokens": config.trainer.micro_tokens,
        "vocabulary": text.vocab_size,
        "dtype": getattr(torch, config.trainer.dtype),
        "device": device,
        "temperature": config.rollout.temperature,
        "entropy": config.algorithm.entropy_coefficient > 0,
    }
    warming = Thread(target=warm_up, kwargs=settings, name="warm-up", daemon=True)
    warming.start()
    return warming


def _attend(
    config: Config, folder: Path, fleet: Fleet, publisher: Publisher, background: Background, queue: GroupQueue
) -> Control:
    """From here on engines are watched and fed, and may join and leave."""
    fleet.keeper.begin(publisher)
    background.spawn(fleet.keeper.watch(), on_error=queue.fail)
    engines = config.engines
    control = Control(fleet, folder=folder, host=engines.join_host, port=engines.join_port, token=run_token(folder))
    background.call(control.start())
    return control


def _shown(console: Console, sinks: Sinks, autoscaler: Autoscaler | None) -> Callable[[dict[str, Any]], None]:
    def shown(line: dict[str, Any]) -> None:
        console.show(line)
        sinks.write(line)
        if autoscaler is not None and "period" in line:
            autoscaler.saw(line)

    return shown


def _autoscaler(config: Config, folder: Path, say: Callable[[str], None]) -> Autoscaler | None:
    engines = config.engines
    if not engines.autoscale_command:
        return None
    return Autoscaler(
        command=engines.autoscale_command,
        rule=Rule(wait=engines.autoscale_wait, idle=engines.autoscale_idle, periods=engines.autoscale_periods),
        every=engines.autoscale_seconds,
        folder=folder,
        say=say,
    )


def _prompts(config: Config, path: str, template: Template, *, shuffle: bool) -> PromptStream:
    rows = read_rows(Path(asset_or_path(path)), config.data.prompt)
    return PromptStream(dataset=Dataset(rows=rows, seed=config.run.seed, shuffle=shuffle), template=template)


def _evaluation(config: Config, producer: Producer, template: Template, lane: Lane, recorder: Recorder) -> Evaluation:
    held_out = []
    if config.data.eval:
        stream = _prompts(config, config.data.eval, template, shuffle=False)
        held_out = stream.take(min(config.eval.prompts or len(stream.dataset), len(stream.dataset)))
    return Evaluation(
        producer=producer,
        prompts=held_out,
        samples=config.eval.samples,
        every=config.eval.every,
        total=config.schedule.periods,
        lane=lane,
        on_result=recorder.evaluated,
    )
