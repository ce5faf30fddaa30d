"""Trains recorded periods again and measures differences: what rank 0 of a replay group does.

The *leading* group has the run's own number of ranks. From the start it goes through the periods as they were recorded.
Before each step, from the weights that the run had there, it computes the synchronous gradient and those of other
orders and packings and compares them; then it takes the recorded step and compares hashes. At last it goes from the
start again, synchronously, and compares weights. It leaves states and synchronous gradients in the plan's folder:
a group with another number of ranks starts from these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rondo.config import Config, changed
from rondo.rollout.journal import RecordedPeriod, read_period
from rondo.stream.scatter import divide
from rondo.trainer.ensemble import AnyTrainer, Ensemble
from rondo.trainer.fingerprint import fingerprint
from rondo.trainer.parallel import Alone
from rondo.trainer.trainer import Trainer
from rondo.types import MicroBatch
from rondo.verify.compare import Rounding, differences
from rondo.verify.plan import Check, Plan, Reproduced, Results
from rondo.verify.schedules import recorded, shuffled, synchronous

Tensors = dict[str, torch.Tensor]


class Prover:
    def __init__(
        self, *, plan: Plan, config: Config, trainer: AnyTrainer, ranks: int, truth: Callable[[], Trainer]
    ) -> None:
        self._plan = plan
        self._config = config
        self._trainer = trainer
        self._truth = truth  # the same trainer in float64, on one rank
        self._ranks = ranks
        self._scratch = Path(plan.scratch)
        self._results = Results()

    def prove(self) -> Results:
        if self._plan.leading:
            self._lead()
        else:
            self._compare()
        if self._plan.truth and self._rounds():
            with self._timed("float64"):
                self._measure_rounding()
        return self._results

    def _rounds(self) -> bool:
        """Exact sums often leave nothing to bound, even under other packs; what followers then find must be no bit."""
        exact = self._plan.leading and self._config.trainer.accumulation == "exact"
        return not exact or any(tensor.differing for check in self._results.checks for tensor in check.tensors)

    def _lead(self) -> None:
        if self._plan.start:
            self._trainer.read(Path(self._plan.start), steps=self._plan.steps)
        self._trainer.write(self._scratch / "start")
        self._results.before = fingerprint(list(self._trainer.weights()), Alone())
        weights = {}
        for number in self._plan.chain:
            period = read_period(Path(self._plan.run), number)
            self._trainer.begin_period()
            if number in self._plan.checked:
                self._checked_period(period)
                weights[number] = _copied(self._trainer.weights())
            else:
                live = recorded(self._config, period)
                for update in range(len(period.updates)):
                    self._step_as_recorded(period, update, self._feed(live[update]))
        if self._plan.synchronous_chain:
            with self._timed("synchronous chain"):
                self._synchronous_chain(weights)

    def _checked_period(self, period: RecordedPeriod) -> None:
        live = recorded(self._config, period)
        reference = live if self._plan.as_recorded else synchronous(self._config, period, self._ranks)
        others = [("order", "shuffled arrival", self._config, shuffled(self._config, period, self._ranks, t))
                  for t in range(self._plan.trials)]  # fmt: skip
        for budget in self._plan.packings:
            packed = changed(self._config, "trainer.micro_tokens", budget)
            others.append(("packing", f"packs of {budget}", packed, synchronous(packed, period, self._ranks)))
        for update in range(len(period.updates)):
            self._trainer.write(self._at("state", period.period, update))
            with self._timed("synchronous"):
                self._feed(reference[update])
                gradient = _copied(self._trainer.gradient())
                self._trainer.discard()
            save_file(gradient, self._at("gradient", period.period, update))
            for kind, name, config, micros in others:
                with self._timed(name), self._budget(config.trainer.micro_tokens):
                    seconds = self._feed(micros[update])
                    self._check(kind, name, seconds, gradient, period.period, update)
                    self._trainer.discard()
            with self._timed("recorded"):
                seconds = self._feed(live[update])
                self._check("order", "recorded arrival", seconds, gradient, period.period, update)
                self._step_as_recorded(period, update, seconds)

    def _step_as_recorded(self, period: RecordedPeriod, update: int, seconds: list[float]) -> None:
        self._trainer.step()
        found, told = self._trainer.hashes, period.updates[update].hashes
        self._results.reproduced.append(
            Reproduced(
                period=period.period,
                update=update,
                recorded=asdict(told) if told else None,
                found=asdict(found) if found else None,
                seconds=tuple(seconds),
            )
        )

    def _synchronous_chain(self, weights: dict[int, Tensors]) -> None:
        """The whole way again, each period after the last one of its own."""
        self._trainer.read(self._scratch / "start", steps=self._plan.steps)
        for number in self._plan.chain:
            period = read_period(Path(self._plan.run), number)
            self._trainer.begin_period()
            for update in synchronous(self._config, period, self._ranks):
                self._feed(update)
                self._trainer.step()
            if number in weights:
                held = tuple(differences(self._trainer.weights(), weights[number]))
                self._results.checks.append(
                    Check(
                        name="after the period",
                        kind="order",
                        what="weights",
                        period=number,
                        update=0,
                        micros=0,
                        seconds=(),
                        tensors=held,
                    )
                )

    def _compare(self) -> None:
        """From the leading group's weights, on another number of ranks."""
        for number in self._plan.checked:
            period = read_period(Path(self._plan.run), number)
            variants = {f"{self._ranks} ranks": synchronous(self._config, period, self._ranks)}
            if self._plan.as_recorded and self._as_divided(period):
                variants = {"recorded arrival": recorded(self._config, period)}
            if self._plan.trials:
                variants[f"{self._ranks} ranks, shuffled"] = shuffled(self._config, period, self._ranks, 0)
            for update in range(len(period.updates)):
                self._restore(self._trainer, number, update)
                gradient = load_file(self._at("gradient", number, update))
                for name, micros in variants.items():
                    with self._timed(name):
                        seconds = self._feed(micros[update])
                        self._check("ranks", name, seconds, gradient, number, update)
                        self._trainer.discard()

    def _as_divided(self, period: RecordedPeriod) -> bool:
        """Whether the recorded rounds can be fed here as they are."""
        held = (self._config.trainer.micro_tokens, self._ranks)
        return held == (period.header["micro_tokens"], period.header["ranks"])

    def _measure_rounding(self) -> None:
        """The synchronous gradient in float64, micro-batch by micro-batch, by one rank."""
        truth = self._truth()
        for number in self._plan.checked:
            period = read_period(Path(self._plan.run), number)
            updates = synchronous(self._config, period, self._plan.leading_ranks)
            for update in range(len(period.updates)):
                self._restore(truth, number, update)
                given = load_file(self._at("gradient", number, update))
                self._results.rounding[f"{number}-{update}"] = self._rounding(truth, updates[update], given)

    def _rounding(self, truth: Trainer, micros: list[MicroBatch], given: Tensors) -> dict[str, Rounding]:
        ranks, budget = self._plan.leading_ranks, self._config.trainer.micro_tokens
        names = [name for name, _ in truth.model.named_parameters()]
        total = {name: torch.zeros(given[name].shape, dtype=torch.float64) for name in names}
        absolute = {name: torch.zeros_like(tensor) for name, tensor in total.items()}
        for micro in micros:
            for pack in divide(micro, ranks=ranks, budget=budget):
                if not pack.parts:
                    continue
                truth.discard()
                truth.accumulate(MicroBatch(parts=pack.parts))
                for name, gradient in zip(names, truth.gradients(), strict=True):
                    total[name] += gradient.cpu()
                    absolute[name] += gradient.cpu().abs()
        truth.discard()
        for micro in micros:
            truth.count(micro)
        divisor = truth.divisor()
        truth.discard()
        return {
            name: Rounding(
                error=float((given[name].double() - total[name] / divisor).norm()),
                absolute=float(absolute[name].norm()) / divisor,
                unit=torch.finfo(given[name].dtype).eps / 2,
            )
            for name in given
        }

    def _feed(self, micros: list[MicroBatch]) -> list[float]:
        """Seconds of every micro-step that computed something."""
        seconds = []
        for micro in micros:
            began = time.perf_counter()
            self._trainer.accumulate(micro)
            if micro.parts:
                seconds.append(time.perf_counter() - began)
        return seconds

    def _check(self, kind: str, name: str, seconds: list[float], gradient: Tensors, period: int, update: int) -> None:
        self._results.checks.append(
            Check(
                name=name,
                kind=kind,
                what="gradient",
                period=period,
                update=update,
                micros=self._ranks * len(seconds),
                seconds=tuple(seconds),
                tensors=tuple(differences(self._trainer.gradient(), gradient)),
            )
        )

    def _restore(self, trainer: AnyTrainer, period: int, update: int) -> None:
        """The weights before this update, and an old policy of those before the period's first."""
        trainer.read(self._at("state", period, 0), steps=0)
        trainer.begin_period()
        if update:
            trainer.read(self._at("state", period, update), steps=0)

    def _at(self, what: str, period: int, update: int) -> Path:
        return self._scratch / f"{what}-{period}-{update}"

    @contextmanager
    def _budget(self, tokens: int) -> Iterator[None]:
        """Packs of another size are also divided among ranks by it."""
        if not isinstance(self._trainer, Ensemble):
            yield
            return
        before, self._trainer.micro_tokens = self._trainer.micro_tokens, tokens
        yield
        self._trainer.micro_tokens = before

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._results.seconds[name] = self._results.seconds.get(name, 0.0) + time.perf_counter() - began


def _copied(named: Iterator[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}
