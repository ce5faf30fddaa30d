"""The trainer of one rank: micro-batches in, raw gradient sums; one division, one clip, one step.

Sums, not means: the loss of a micro-batch is a sum over its tokens, so any arrival order and packing yield the same
gradient. What it is divided by (tokens, responses, a constant) is counted alongside and applied once, in `step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from rondo.attention.layout import Layout, separate_layout, shared_prompt_layout
from rondo.errors import NonFiniteGradientError
from rondo.observe.lane import Lane
from rondo.observe.metrics import Tally
from rondo.trainer.objective.base import Objective, TokenBatch
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.trainer.optim import LearningRate
from rondo.trainer.tri_model import TriLogps, TriModel
from rondo.types import Group, MicroBatch, Part


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    normalise: str  # sequences | tokens | constant
    constant: int  # tokens a response counts for under "constant"
    attention: str  # shared-prompt | separate
    max_grad_norm: float


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
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps = 0  # optimizer steps taken in the whole run
        self.tally = Tally()
        self._objective = objective
        self._reward_kl = reward_kl
        self._learning_rate = learning_rate
        self._settings = settings
        self._lane = lane
        self._device = device
        self._begin_update()

    def begin_period(self) -> None:
        self.model.begin_period()
        self.tally = Tally()

    def accumulate(self, micro: MicroBatch) -> None:
        """Forward and backward: adds this micro-batch's raw sums to the gradient and to the counts."""
        self._count(micro)
        if micro.parts:
            with self._lane.doing("training"):
                self._micros.append(micro)
                self._backward(micro, self.tally)

    def step(self) -> None:
        """Divide once, clip, one optimizer step. A gradient that is not finite stops the run before it."""
        with self._lane.doing("stepping"):
            gradients = self.gradients()
            torch._foreach_div_(gradients, float(self._divisor()))
            norm = torch.nn.utils.get_total_norm(gradients)
            if not torch.isfinite(norm):
                raise NonFiniteGradientError(self._accusation())
            torch.nn.utils.clip_grads_with_norm_(
                list(self.model.policy.parameters()), self._settings.max_grad_norm, norm
            )
            rate = self._learning_rate(self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.steps += 1
            self.tally.mean("gradient_norm", norm, 1)
            self.tally.mean("learning_rate", rate, 1)
            self.tally.mean("loss", self._loss, self._divisor())
            self._begin_update()

    def gradients(self) -> list[torch.Tensor]:
        """The raw sums gathered so far, in the order of the parameters; zeros where nothing was run."""
        gradients = []
        for _, parameter in self.model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def _begin_update(self) -> None:
        self._micros: list[MicroBatch] = []
        self._loss = torch.zeros((), device=self._device)
        self._sequences = self._tokens = 0
        self.optimizer.zero_grad(set_to_none=True)

    def _count(self, micro: MicroBatch) -> None:
        lengths = [len(response.token_ids) for part in micro.parts for response in part.responses]
        lengths += [len(response.token_ids) for group in micro.skipped for response in group.answer.responses]
        self._sequences += len(lengths)
        self._tokens += sum(lengths)
        self.tally.add("groups_skipped", len(micro.skipped))
        self.tally.add("groups_trained", sum(part.first == 0 for part in micro.parts))

    def _divisor(self) -> int:
        if self._settings.normalise == "tokens":
            return max(1, self._tokens)
        if self._settings.normalise == "constant":
            return max(1, self._sequences * self._settings.constant)
        return max(1, self._sequences)

    def _backward(self, micro: MicroBatch, tally: Tally) -> None:
        layout = self._layout(micro.parts)
        logps = self.model.logps(layout)
        like = partial(torch.tensor, dtype=logps.policy_N.dtype, device=self._device)
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
        loss.backward()  # type: ignore[no-untyped-call]
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
        build = separate_layout if self._settings.attention == "separate" else shared_prompt_layout
        return build(segments).to(self._device)

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
        tally.mean(
            "logp_gap_kl", gap_N.sum(), count
        )  # the samples are the engine's: this is k1 of KL(engine || trainer)
        tally.maximum("logp_gap_max", gap_N.abs().max())
        tally.mean("entropy", -policy_N.sum(), count)
        tally.add("micro_steps", 1)
        tally.add("tokens_computed", layout.tokens_T.numel())

    def _accusation(self) -> str:
        """Which groups made the gradient infinite: each micro-batch is run again, alone."""
        guilty: list[Group] = []
        for micro in self._micros:
            self.optimizer.zero_grad(set_to_none=True)
            self._backward(micro, Tally())
            if not all(bool(gradient.isfinite().all()) for gradient in self.gradients()):
                guilty += [part.group for part in micro.parts]
        names = ", ".join(f"prompt {group.prompt.ordinal}" for group in guilty[:8]) or "no single micro-batch"
        return (
            f"the gradient of update {self.steps} is not finite; responsible: {names}. No step was taken: "
            "look at these groups in samples.jsonl, lower trainer.learning_rate or check the rewards"
        )
