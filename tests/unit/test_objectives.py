"""Every objective against its paper's formula, written out one response at a time over the whole batch.

The policy differs from the old policy, so that ratios are not 1 and both clip bounds bite; micro-batches are random.
"""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest
import torch

from rondo.config import parse_config
from rondo.errors import ConfigError
from rondo.rollout.advantage import EPSILON, advantages_of, whiten
from rondo.trainer.logprobs import token_logps
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.types import Group, MicroBatch, Response
from tests.models import tiny_model
from tests.trainers import gradient_after, make_trainer, micros_of, random_groups
from tests.unit.test_config import tree

LIMIT = 16  # make_trainer's constant
ALGORITHMS = ("grpo", "dr-grpo", "dapo", "gspo", "rloo", "reinforce++", "cispo")
TIGHT = {
    "gspo": (0.02, 0.03),
    "rloo": (0.1, 0.2),
    "cispo": (1.0, 0.1),
    "dapo": (0.08, 0.12),
}  # or hardly any is clipped


def batch(algorithm: str, count: int = 6) -> list[Group]:
    """Random groups with rewards, and the advantages that the rollout side gives them."""
    draw = random.Random(algorithm)
    scale = parse_config(tree(algorithm={"name": algorithm})).algorithm.scale_advantages
    estimate = advantages_of(algorithm, scale=scale)
    groups = []
    for group in random_groups(count, seed=len(algorithm)):
        rewards = tuple(draw.uniform(-1, 1) for _ in group.rewards)
        responses = tuple(
            dataclasses.replace(response, logps=tuple(draw.uniform(-4, -1) for _ in response.logps))
            for response in group.answer.responses
        )
        answer = dataclasses.replace(group.answer, responses=responses)
        groups.append(dataclasses.replace(group, answer=answer, rewards=rewards, advantages=estimate(rewards)))
    return whiten(groups, scale=scale) if algorithm == "reinforce++" else groups


def drifted_trainer(algorithm: str, **options):
    """A trainer in the middle of a period: its policy is no longer the one that generated."""
    normalise = parse_config(tree(algorithm={"name": algorithm})).algorithm.normalise
    clip = TIGHT.get(algorithm, (0.1, 0.1))
    trainer = make_trainer(algorithm=algorithm, clip=clip, keep_old=True, normalise=normalise, **options)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.model.policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return trainer


class Literal:
    """The models as transformers runs them, and each paper's formula."""

    def __init__(self, trainer, temperature: float = 1.0) -> None:
        self.policy, self.old, self.reference = (
            tiny_model(dtype=torch.float64, seed=seed).requires_grad_(seed == 0) for seed in (0, 2, 1)
        )
        self.policy.load_state_dict(trainer.model.policy.state_dict())
        self.old.load_state_dict(trainer.model.old.state_dict())
        self.temperature = temperature

    def scores(self, model, group: Group, response: Response) -> torch.Tensor:
        ids = torch.tensor([[*group.prompt.token_ids, *response.token_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0] / self.temperature
        return logits.log_softmax(-1)[len(group.prompt.token_ids) - 1 : -1]

    def logps(self, model, group: Group, response: Response) -> torch.Tensor:
        return self.scores(model, group, response).gather(-1, torch.tensor(response.token_ids)[:, None])[:, 0]

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, list(self.policy.parameters())))

    def loss(self, algorithm: str, groups: list[Group], rewards_of=None, per_token=None) -> torch.Tensor:
        """-J of the whole batch; `per_token` adds a term to (or weighs) each token's surrogate."""
        low, high = TIGHT.get(algorithm, (0.1, 0.1))
        by_token = [
            reward
            for group in groups
            for reward, response in zip(group.rewards, group.answer.responses, strict=True)
            for _ in response.token_ids
        ]
        total, sequences, tokens = torch.zeros((), dtype=torch.float64), 0, 0
        for group in groups:
            rewards = list(group.rewards) if rewards_of is None else rewards_of(group)
            for i, response in enumerate(group.answer.responses):
                new, old = self.logps(self.policy, group, response), self.logps(self.old, group, response)
                others = rewards[:i] + rewards[i + 1 :]
                advantage = {
                    "grpo": (rewards[i] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON),
                    "dr-grpo": rewards[i] - statistics.fmean(rewards),
                    "rloo": rewards[i] - statistics.fmean(others),
                    "reinforce++": (rewards[i] - statistics.fmean(by_token)) / (statistics.pstdev(by_token) + EPSILON),
                }.get(algorithm)
                if advantage is None:  # DAPO, GSPO and CISPO estimate as GRPO does
                    advantage = (rewards[i] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + EPSILON)
                length = len(response.token_ids)
                if algorithm in ("gspo", "rloo"):
                    ratio = (new - old).sum().exp() if algorithm == "rloo" else (new - old).mean().exp()
                    value = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
                    value = value.expand(length)
                elif algorithm == "cispo":
                    value = (new.detach() - old).exp().clamp(1 - low, 1 + high) * advantage * new
                else:
                    ratio = (new - old).exp()
                    value = torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
                if per_token is not None:
                    value = per_token(value, group, response, old)
                by_length = algorithm in ("grpo", "gspo", "rloo", "reinforce++")
                total = total - (value.sum() / length if by_length else value.sum())
                sequences, tokens = sequences + 1, tokens + length
        divisor = {"dr-grpo": sequences * LIMIT, "dapo": tokens, "cispo": tokens}.get(algorithm, sequences)
        return total / divisor


def random_splits(groups: list[Group], *, whole: bool = False) -> list[list[MicroBatch]]:
    splits = []
    for seed, budget in enumerate((14, 45, 120, 10_000)):
        arrived = random.Random(seed).sample(groups, len(groups))
        splits.append(micros_of(arrived, max(budget, max(g.tokens for g in groups)) if whole else budget))
    return splits


def assert_same(trainer, expected: list[torch.Tensor], micros: list[MicroBatch], bound: float = 1e-6) -> None:
    trainer._begin_update()
    sums = gradient_after(trainer, micros)
    for (name, _), truth, found in zip(trainer.model.named_parameters(), expected, sums, strict=True):
        error = (found / trainer.divisor() - truth).norm() / truth.norm().clamp_min(1e-9)
        assert error < bound, (name, float(error))  # RMSNorm computes in float32 even in a float64 model


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_is_the_papers_whatever_the_micro_batches(algorithm):
    groups, trainer = batch(algorithm), drifted_trainer(algorithm)
    literal = Literal(trainer)
    expected = literal.gradients(literal.loss(algorithm, groups))
    for micros in random_splits(groups):
        assert_same(trainer, expected, micros)
    assert 0.05 < trainer.tally.read()["clip_fraction"] < 0.95


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_the_first_update_the_gradient_is_that_of_the_plain_policy_gradient(algorithm):
    """Ratio 1: Σ A ∇ log π with each paper's weights; it needs no old policy."""
    groups = batch(algorithm)
    normalise = parse_config(tree(algorithm={"name": algorithm})).algorithm.normalise
    trainer = make_trainer(algorithm=algorithm, clip=TIGHT.get(algorithm, (0.1, 0.1)), normalise=normalise)
    policy = tiny_model(dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for response, advantage in zip(group.answer.responses, group.advantages, strict=True):
            ids = torch.tensor([[*group.prompt.token_ids, *response.token_ids]])
            scores = policy(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            logp = scores[len(group.prompt.token_ids) - 1 : -1].gather(-1, ids[0, -len(response.token_ids) :, None])
            by_length = algorithm in ("grpo", "gspo", "reinforce++")
            total = total - advantage * logp.sum() / (len(response.token_ids) if by_length else 1)
            count += {"dr-grpo": LIMIT, "dapo": len(response.token_ids), "cispo": len(response.token_ids)}.get(
                algorithm, 1
            )
    expected = list(torch.autograd.grad(total / count, list(policy.parameters())))
    assert_same(trainer, expected, random_splits(groups)[1])


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_is_a_term_per_token_beside_any_surrogate(algorithm, estimator):
    groups, trainer = batch(algorithm, 4), drifted_trainer(algorithm, kl=0.3, estimator=estimator)
    literal = Literal(trainer)

    def with_kl(value, group, response, old):
        x = literal.logps(literal.reference, group, response) - literal.logps(literal.policy, group, response)
        return value - 0.3 * {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator]

    expected = literal.gradients(literal.loss(algorithm, groups, per_token=with_kl))
    for micros in random_splits(groups):
        assert_same(trainer, expected, micros)


@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo", "rloo"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_the_reward_changes_the_advantages_of_whole_groups(algorithm, estimator):
    scale = parse_config(tree(algorithm={"name": algorithm})).algorithm.scale_advantages
    penalty = RewardKL(coefficient=0.2, estimator=estimator, advantages=advantages_of(algorithm, scale=scale))
    groups, trainer = batch(algorithm, 5), drifted_trainer(algorithm, reward_kl=penalty)
    literal = Literal(trainer)

    def penalised(group):
        rewards = []
        for reward, response in zip(group.rewards, group.answer.responses, strict=True):
            x = literal.logps(literal.reference, group, response) - literal.logps(literal.old, group, response)
            rewards.append(reward - 0.2 * float({"k1": -x, "k3": x.exp() - 1 - x}[estimator].sum()))
        return rewards

    expected = literal.gradients(literal.loss(algorithm, groups, rewards_of=penalised))
    for micros in random_splits(groups, whole=True):
        assert_same(trainer, expected, micros)


def test_kl_in_the_reward_refuses_a_split_group_and_names_both_keys():
    penalty = RewardKL(coefficient=0.2, estimator="k1", advantages=advantages_of("rloo", scale=False))
    trainer = drifted_trainer("rloo", reward_kl=penalty)
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.place.*trainer\.micro_tokens"):
        gradient_after(trainer, micros_of(batch("rloo"), 9))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_the_entropy_bonus_is_the_entropy_of_the_whole_distribution(algorithm, monkeypatch):
    groups, trainer = batch(algorithm, 4), drifted_trainer(algorithm, entropy=0.1, temperature=0.7)
    literal = Literal(trainer, temperature=0.7)

    def with_entropy(value, group, response, old):
        scores = literal.scores(literal.policy, group, response)
        return value + 0.1 * -(scores.exp() * scores).sum(-1)

    expected = literal.gradients(literal.loss(algorithm, groups, per_token=with_entropy))
    for chunk in (1 << 24, 100):
        monkeypatch.setattr("rondo.trainer.logprobs.CHUNK_ELEMENTS", chunk)
        for micros in random_splits(groups):
            assert_same(trainer, expected, micros)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_the_engine_correction_weighs_each_tokens_surrogate_up_to_the_cap(algorithm):
    groups, trainer = batch(algorithm, 4), drifted_trainer(algorithm, correction_cap=2.0)
    literal, weights = Literal(trainer), []

    def corrected(value, group, response, old):
        weight = (old.detach() - torch.tensor(response.logps, dtype=torch.float64)).exp().clamp(max=2.0)
        weights.extend(weight.tolist())
        return value * weight

    expected = literal.gradients(literal.loss(algorithm, groups, per_token=corrected))
    assert 0 < sum(weight == 2.0 for weight in weights) < len(weights)
    for micros in random_splits(groups):
        assert_same(trainer, expected, micros)


def test_chunked_entropies_equal_whole_ones_in_value_and_gradient(monkeypatch):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, dtype=torch.float64)
    hidden, target = torch.randn(23, 16, dtype=torch.float64, requires_grad=True), torch.randint(50, (23,))
    scores = (head(hidden) / 0.5).log_softmax(-1)
    truth = torch.stack([scores.gather(-1, target[:, None])[:, 0], -(scores.exp() * scores).sum(-1)])
    (expected,) = torch.autograd.grad(truth.square().sum(), hidden)
    for elements in (1 << 24, 200):
        monkeypatch.setattr("rondo.trainer.logprobs.CHUNK_ELEMENTS", elements)
        found = token_logps(head, hidden, target, temperature=0.5, vocabulary=50, entropy=True)
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(found.square().sum(), hidden)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
