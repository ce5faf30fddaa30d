"""The trainer of one rank: micro-batches in, raw gradient sums; one division, one clip, one step.

Sums, not means: the loss of a micro-batch is a sum over its tokens, so any arrival order, packing and rank count yield
the same gradient. What it is divided by (tokens, responses, a constant) is counted alongside and applied once, in
`step`, from the totals over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rondo.attention.layout import Layout, auto_layout, separate_layout, shared_prompt_layout
from rondo.errors import NonFiniteGradientError
from rondo.observe.lane import Lane, Stretch, on_our_clock
from rondo.observe.metrics import Tally
from rondo.trainer.accumulate import Accumulator, FloatSum, IntegerSum
from rondo.trainer.fingerprint import fingerprint
from rondo.trainer.objective.base import Objective, TokenBatch
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.trainer.optim import LearningRate
from rondo.trainer.parallel import Alone, Ranks, own, whole
from rondo.trainer.state import read_state, write_state
from rondo.trainer.tri_model import TriLogps, TriModel
from rondo.types import MicroBatch, Part, StepHashes

LAYOUTS = {"auto": auto_layout, "shared-prompt": shared_prompt_layout, "separate": separate_layout}
IDLE_ROW = shared_prompt_layout([((0,), [(0,)])])  # what a rank without a pack computes, to take part


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    normalise: str  # sequences | tokens | constant
    constant: int  # tokens a response counts for under "constant"
    attention: str  # auto | shared-prompt | separate
    max_grad_norm: float
    exact: bool = False  # sum gradients as integers; every rank then holds the whole model
    hashes: bool = False  # of every step's gradient and weights
    reduce_once: bool = False  # over the ranks: in the step, not in every backward pass
    multiple: int = 1  # rows are padded to a multiple of so many tokens


class Trainer:
    def __init__(
        self,
        *,
        model: TriModel,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        settings: TrainerSettings,
        lane: Lane,
        device: torch.device,
        reward_kl: RewardKL | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps = 0  # optimizer steps taken in the whole run
        self.hashes: StepHashes | None = None  # of the last step
        self.tally = Tally()
        self._objective = objective
        self._reward_kl = reward_kl
        self._learning_rate = learning_rate
        self._settings = settings
        self._lane = lane
        self.device = device
        self._ranks = ranks or Alone()
        named = model.named_parameters()
        self._accumulator: Accumulator = (
            IntegerSum(named, self._ranks) if settings.exact else FloatSum(parameter for _, parameter in named)
        )
        # Sharded parameters are gathered in every pass: all ranks run the same number of them.
        self._lockstep = self._ranks.size > 1 and not settings.exact
        self._unreduced = False  # gradients of this rank alone are held somewhere
        self._met = 0.0  # when all ranks last left the same exchange
        self._others: dict[int, list[Stretch]] = {}
        self._begin_update()

    def begin_period(self) -> None:
        self.model.begin_period()
        self.tally = Tally()

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward and backward: adds this micro-batch's raw sums to the gradient and to the counts.

        With several ranks all are called together, some perhaps with an empty micro-batch.
        """
        self.count(micro)
        if micro.parts or self._lockstep:
            indices = [part.group.index for part in micro.parts]
            with self._lane.doing("training", indices, sum(part.tokens for part in micro.parts)):
                self._micros.append(micro)
                if self._lockstep and self._settings.reduce_once:
                    self.model.reduce_gradients(False)
                    self._unreduced = True
                for piece in self._accumulator.pieces(micro):
                    self._backward(piece, self.tally)
                    self._accumulator.collect(piece)

    def count(self, micro: MicroBatch) -> None:
        """What the gradient will be divided by; for groups that are skipped, this is all there is to do."""
        lengths = [len(response.token_ids) for part in micro.parts for response in part.responses]
        lengths += [len(response.token_ids) for group in micro.skipped for response in group.answer.responses]
        self._sequences += len(lengths)
        self._tokens += sum(lengths)
        self.tally.add("groups_skipped", len(micro.skipped))
        self.tally.add("groups_trained", sum(part.first == 0 for part in micro.parts))

    def step(self) -> None:
        """Divide once, clip, one optimizer step. A gradient that is not finite stops the run before it."""
        with self._lane.doing("stepping"):
            gradients = self._divided()
            hashed = self._hash(gradients)
            norm = whole(torch.nn.utils.get_total_norm(gradients))
            if not torch.isfinite(norm):
                raise NonFiniteGradientError(self._accusation())
            torch.nn.utils.clip_grads_with_norm_(
                [parameter for _, parameter in self.model.named_parameters()], self._settings.max_grad_norm, norm
            )
            rate = self._learning_rate(self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.model.moved()
            self.steps += 1
            if self._settings.hashes:
                weights = self._hash([parameter for _, parameter in self.model.named_parameters()])
                self.hashes = StepHashes(gradient=hashed, weights=weights, norm=float(norm))
            self.tally.mean("gradient_norm", norm, 1)
            self.tally.mean("learning_rate", rate, 1)
            self.tally.mean("loss", self._loss, self.divisor())
            self._gather_tally()
            self._begin_update()

    def gradients(self) -> list[torch.Tensor]:
        """The raw sums gathered so far, in the order of the parameters; zeros where nothing was run."""
        if self._unreduced:  # a backward pass that adds nothing takes along what was held back
            self._unreduced = False
            self.model.reduce_gradients(True)
            self._backward(MicroBatch(parts=()), Tally())
        return self._accumulator.total()

    def gradient(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What `step` will clip and apply, whole, one at a time; every rank must go through all of them. Nothing can be
        accumulated any more before it or `discard`."""
        names = [name for name, _ in self.model.named_parameters()]
        for name, tensor in zip(names, self._divided(), strict=True):
            yield name, whole(tensor)

    def discard(self) -> None:
        """Forget what was accumulated since the last step."""
        self._begin_update()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's tensors, whole, one at a time; every rank must go through all of them."""
        return self.model.weights()

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a text's tokens from the second on, under the policy as it is; every rank must score along."""
        text = [((token_ids[0],), (tuple(token_ids[1:]),))]
        layout = separate_layout(text, multiple=self._settings.multiple)
        logps: list[float] = self.model.plain_logps(layout.to(self.device)).float().tolist()
        return logps

    def write(self, folder: Path) -> None:
        """Weights and optimizer; every rank its shards."""
        write_state(folder, self.model.named_parameters(), self.optimizer, self._ranks)

    def read(self, folder: Path, *, steps: int) -> None:
        """What any number of ranks wrote after so many steps."""
        read_state(folder, self.model.named_parameters(), self.optimizer, self._ranks)
        self.model.moved()
        self.steps = steps

    def close(self) -> None:
        """Nobody to let go."""

    def _begin_update(self) -> None:
        self._micros: list[MicroBatch] = []
        self._final: list[torch.Tensor] | None = None  # the divided gradient, once it is asked for
        self._loss = torch.zeros((), device=self.device)
        self._sequences = self._tokens = 0
        self._accumulator.clear()

    def _divided(self) -> list[torch.Tensor]:
        """The gradient: raw sums over the totals of all ranks."""
        if self._final is None:
            self._add_up_counts()
            self._final = self.gradients()
            torch._foreach_div_(self._final, float(self.divisor()))
        return self._final

    def _hash(self, tensors: Sequence[torch.Tensor]) -> str:
        """Of tensors in the order of the parameters."""
        if not self._settings.hashes:
            return ""
        began = time.perf_counter()
        names = [name for name, _ in self.model.named_parameters()]
        found = fingerprint(list(zip(names, tensors, strict=True)), self._ranks)
        if self._ranks.rank == 0:
            self.tally.add("hash_seconds", time.perf_counter() - began)
        return found

    def _add_up_counts(self) -> None:
        if self._ranks.size > 1:
            counts = self._ranks.exchange([self._sequences, self._tokens, float(self._loss)])
            self._sequences, self._tokens, loss = map(sum, zip(*counts, strict=True))
            self._loss.fill_(loss)

    def _gather_tally(self) -> None:
        """Rank 0 holds the tally of all."""
        if self._ranks.size > 1:
            mine = [] if self._ranks.rank == 0 else self._lane.cut().stretches
            told = self._ranks.exchange({"tally": self.tally.dump(), "lane": mine, "met": self._met})
            self.tally = Tally()
            for rank, other in enumerate(told if self._ranks.rank == 0 else ()):
                self.tally.merge(other["tally"])
                if rank and self._met:
                    found = on_our_clock(other["lane"], theirs=other["met"], ours=self._met)
                    self._others.setdefault(rank, []).extend(found)
            self._met = time.monotonic()

    def take_others(self) -> dict[int, list[Stretch]]:
        """On rank 0: what the other ranks did up to the last step, on this rank's clock."""
        others, self._others = self._others, {}
        return others

    def divisor(self) -> int:
        """Of the gradient: what was counted so far, on this rank until the ranks have added up."""
        if self._settings.normalise == "tokens":
            return max(1, self._tokens)
        if self._settings.normalise == "constant":
            return max(1, self._sequences * self._settings.constant)
        return max(1, self._sequences)

    def _backward(self, micro: MicroBatch, tally: Tally) -> None:
        if not micro.parts:
            idle_N = self.model.logps(IDLE_ROW.to(self.device)).policy_N
            (idle_N.sum() * 0).backward()  # type: ignore[no-untyped-call]
            return
        began = time.monotonic()
        layout = self._layout(micro.parts)
        logps = self.model.logps(layout)
        like = partial(torch.tensor, dtype=logps.policy_N.dtype, device=self.device)
        responses = [response for part in micro.parts for response in part.responses]
        engine_N = like([logp for response in responses for logp in response.logps])
        advantages_M = like(self._advantages(micro.parts, logps, layout, tally))
        weights_M = torch.ones_like(advantages_M)
        if self._settings.normalise == "sequences":
            weights_M = weights_M / layout.lengths_M
        batch = TokenBatch(
            logps_N=logps.policy_N,
            old_N=logps.old_N,
            engine_N=engine_N,
            reference_N=logps.reference_N,
            entropy_N=logps.entropy_N,
            advantages_N=advantages_M.repeat_interleave(layout.lengths_M),
            weights_N=weights_M.repeat_interleave(layout.lengths_M),
            lengths_M=layout.lengths_M,
        )
        loss = self._objective(batch, tally)
        computed = time.monotonic()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.device.type == "cpu":  # elsewhere both are only on their way
            tokens = layout.tokens_T.numel()
            self._lane.mark("forward", began, computed, tokens)
            self._lane.mark("backward", computed, time.monotonic(), tokens)
        self._loss += loss.detach()
        self._measure(logps.policy_N.detach(), logps.old_N, engine_N, layout, tally)

    def _advantages(self, parts: tuple[Part, ...], logps: TriLogps, layout: Layout, tally: Tally) -> list[float]:
        """Of every response: the producer's, or made anew where the reward holds a KL penalty."""
        if self._reward_kl is None:
            return [value for part in parts for value in part.group.advantages[part.first : part.last]]
        assert logps.reference_N is not None
        return self._reward_kl(
            parts, old_N=logps.old_N, reference_N=logps.reference_N, lengths_M=layout.lengths_M, tally=tally
        )

    def _layout(self, parts: tuple[Part, ...]) -> Layout:
        segments = [
            (part.group.prompt.token_ids, [response.token_ids for response in part.responses]) for part in parts
        ]
        return LAYOUTS[self._settings.attention](segments, multiple=self._settings.multiple).to(self.device)

    def _measure(
        self,
        policy_N: torch.Tensor,
        old_N: torch.Tensor,
        engine_N: torch.Tensor,
        layout: Layout,
        tally: Tally,
    ) -> None:
        """How far the engine's log-probs are from the trainer's for the same weights, and the policy's entropy."""
        count = policy_N.numel()
        gap_N = engine_N - old_N
        tally.mean("logp_gap_mean", gap_N.abs().sum(), count)
        # The samples are the engine's: their mean gap is the k1 estimate of KL(engine || trainer).
        tally.mean("logp_gap_kl", gap_N.sum(), count)
        tally.maximum("logp_gap_max", gap_N.abs().max())
        tally.mean("entropy", -policy_N.sum(), count)
        tally.add("micro_steps", 1)
        tally.add("tokens_computed", layout.tokens_T.numel())

    def _accusation(self) -> str:
        """Which groups made the gradient infinite: each rank's micro-batches are run again, alone."""
        guilty: list[int] = []
        for micro in self._micros:
            for rank in range(self._ranks.size):
                mine = rank == self._ranks.rank
                self._accumulator.clear()
                self._backward(micro if mine else MicroBatch(parts=()), Tally())
                finite = all(bool(own(gradient).isfinite().all()) for gradient in self.gradients())
                if not all(self._ranks.exchange(finite)) and mine:
                    guilty += [part.group.prompt.ordinal for part in micro.parts]
        ordinals = [ordinal for found in self._ranks.exchange(guilty) for ordinal in found]
        names = ", ".join(f"prompt {ordinal}" for ordinal in ordinals[:8]) or "no single micro-batch"
        return (
            f"the gradient of update {self.steps} is not finite; responsible: {names}. No step was taken: "
            "check the rewards of these prompts, or lower trainer.learning_rate"
        )
