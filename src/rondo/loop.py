"""The period: the whole algorithm.

Every response of a period is sampled from the same weights, and a gradient is a sum: training groups while others
are still being generated gives the synchronous result. At the start of each period the new weights return to every
engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from rondo.observe.ledger import Ledger
from rondo.observe.recorder import Recorder
from rondo.prompts.stream import PromptStream
from rondo.rollout.evaluation import Evaluation
from rondo.rollout.producer import Producer
from rondo.stream.loader import Loader
from rondo.trainer.checkpoint import Checkpoints
from rondo.trainer.ensemble import AnyTrainer
from rondo.weights.publisher import Publisher


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everyone who takes part."""

    prompts: PromptStream
    producer: Producer
    loader: Loader
    trainer: AnyTrainer
    publisher: Publisher
    ledger: Ledger
    evaluation: Evaluation
    recorder: Recorder
    checkpoints: Checkpoints


def train(run: Run, *, start: int, total: int, prompts_per_period: int) -> None:
    """Train periods start..total-1: period p turns version p of the policy into version p + 1."""
    run.publisher.publish(version=start)
    run.evaluation.evaluate(version=start)
    for period in range(start, total):
        prompts = run.prompts.ahead()  # in an order that is fixed before anything is generated
        run.producer.begin(period, prompts, groups=prompts_per_period)  # in the background
        run.trainer.begin_period()
        for update in run.loader.updates(period):  # one, unless updates_per_period says more
            for micro in update:  # groups in the order in which they finish
                run.trainer.accumulate(micro)  # forward + backward, raw sums
            run.trainer.step()  # divide once, clip, one optimizer step
        run.prompts.advance(run.producer.finish())  # past the last prompt that was needed
        run.publisher.publish(version=period + 1)  # returns when every engine confirmed
        run.ledger.finish(period)  # every group accounted for, or the run stops here
        run.evaluation.evaluate(version=period + 1)
        run.recorder.finish(period)
        run.checkpoints.finish(period)
