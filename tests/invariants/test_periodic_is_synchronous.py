"""Training while generating gives the synchronous result."""

from __future__ import annotations

import random

import torch

from rondo.config import parse_config
from rondo.launch.build_trainer import build_trainer
from rondo.observe.lane import Lane
from tests.invariants.harness import run_here
from tests.trainers import gradient_after, micros_of


def test_in_prompt_order_periodic_and_synchronous_weights_are_the_same_bits(tree):
    prompt_order = {"schedule__order": "prompt", "schedule__periods": 3}
    periodic, witness = run_here(tree(**prompt_order, schedule__mode="periodic"))
    synchronous, _ = run_here(tree(**prompt_order, schedule__mode="synchronous"))
    other_seed, _ = run_here(tree(**prompt_order, run__seed=8))
    assert len(witness.micros) > 6  # several packs per period, or there would be nothing to order
    assert all(map(torch.equal, periodic, synchronous))
    assert not all(map(torch.equal, periodic, other_seed))  # the comparison can fail


def test_in_prompt_order_several_updates_per_period_are_the_same_bits_too(tree):
    several = {"schedule__order": "prompt", "schedule__updates_per_period": 3}
    periodic, _ = run_here(tree(**several, schedule__mode="periodic"))
    synchronous, _ = run_here(tree(**several, schedule__mode="synchronous"))
    assert all(map(torch.equal, periodic, synchronous))


def test_in_arrival_order_the_gradient_differs_only_by_float_summation(tree):
    """Same start, same groups; live arrival order and packs against one synchronous batch and against shuffles.

    A float32 sum of n terms is off by at most n * 2^-24 of the terms' absolute sum; the bound below allows a tensor's
    gradient a hundredfold of the rounding unit relative to its norm, and float64 shows that it is rounding alone.
    """
    _, witness = run_here(tree(schedule__periods=1))
    groups = [group for group in witness.groups if any(group.advantages)]
    config = parse_config(tree())
    for dtype, bound in ((torch.float32, 100 * 2**-24), (torch.float64, 1e-6)):
        truth = None
        for trial in range(4):
            trainer = build_trainer(config, Lane())
            trainer.model.policy.to(dtype)
            arrived = random.Random(trial).sample(groups, len(groups))
            micros = {0: micros_of(groups, 10**6), 1: [m for m in witness.micros if m.parts]}.get(
                trial, micros_of(arrived, 40 * trial)
            )
            gradients = gradient_after(trainer, micros)
            truth = truth or gradients
            for expected, found in zip(truth, gradients, strict=True):
                assert (found - expected).norm() <= bound * expected.norm(), (dtype, trial)


def test_training_starts_before_generation_ends(tree):
    _, witness = run_here(tree(schedule__periods=1, rollout__prompts_per_period=24))
    last_answer = max(group.answered_at for group in witness.groups)
    assert witness.started[0] < last_answer
