"""With a filter, a period trains the first groups that qualify in prompt order, and the next starts behind them."""

from __future__ import annotations

import torch

from tests.invariants.harness import run_here

FILTER = {"algorithm__filter": "nonzero-spread", "rollout__prompts_per_period": 6, "schedule__periods": 3}


def trained_ordinals(witness) -> list[list[int]]:
    return [sorted(group.prompt.ordinal for group in witness.groups if group.period == period) for period in range(3)]


def test_the_kept_groups_do_not_depend_on_arrival_schedule_or_oversampling(tree):
    _, witness = run_here(tree(**FILTER, algorithm__oversample=3))
    _, other = run_here(tree(**FILTER, algorithm__oversample=1, schedule__mode="synchronous"))
    first = trained_ordinals(witness)[0]  # later periods start from weights that differ by a rounding
    assert first == trained_ordinals(other)[0]
    assert len(first) == 6
    for group in witness.groups:
        assert len(set(group.rewards)) > 1
    for period, ordinals in enumerate(trained_ordinals(witness)[1:], start=1):
        assert min(ordinals) > max(trained_ordinals(witness)[period - 1])


def test_in_prompt_order_filtered_periodic_and_synchronous_weights_are_the_same_bits(tree):
    for updates in (1, 2):
        ordered = {**FILTER, "schedule__order": "prompt", "schedule__updates_per_period": updates}
        periodic, witness = run_here(tree(**ordered))
        synchronous, other = run_here(tree(**ordered, schedule__mode="synchronous"))
        assert trained_ordinals(witness) == trained_ordinals(other)
        assert all(map(torch.equal, periodic, synchronous))


def test_whitening_over_the_period_is_the_same_bits_in_both_schedules(tree):
    whitened = {"algorithm__name": "reinforce++", "schedule__order": "prompt"}
    periodic, witness = run_here(tree(**whitened))
    synchronous, _ = run_here(tree(**whitened, schedule__mode="synchronous"))
    assert all(map(torch.equal, periodic, synchronous))
    values = [
        value
        for group in witness.groups
        if group.period == 0
        for value, response in zip(group.advantages, group.answer.responses, strict=True)
        for _ in response.token_ids
    ]
    assert abs(sum(values)) < 1e-9
    assert abs(sum(value * value for value in values) / len(values) - 1) < 1e-4
