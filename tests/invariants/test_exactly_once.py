"""A fixed set of prompts, each sample trained exactly once, asked for by name."""

from __future__ import annotations

from collections import Counter

from rondo.rollout.seeds import group_seed
from tests.invariants.harness import run_here


def test_each_sample_of_each_prompt_is_trained_exactly_once(tree):
    for mode, order in (("periodic", "arrival"), ("synchronous", "arrival"), ("periodic", "prompt")):
        _, witness = run_here(tree(schedule__mode=mode, schedule__order=order, trainer__micro_tokens=24))
        samples = Counter(
            (part.group.period, part.group.index, number)
            for micro in witness.micros
            for part in micro.parts
            for number in range(part.first, part.last)
        )
        skipped = Counter(
            (group.period, group.index, number)
            for micro in witness.micros
            for group in micro.skipped
            for number in range(len(group.answer.responses))
        )
        expected = {(period, index, number) for period in range(2) for index in range(10) for number in range(4)}
        assert samples + skipped == Counter(expected)


def test_a_periods_prompts_are_the_next_of_the_stream_however_slow(tree):
    _, witness = run_here(tree(schedule__periods=3))
    for period in range(3):
        ordinals = {group.index: group.prompt.ordinal for group in witness.groups if group.period == period}
        assert ordinals == {index: period * 10 + index for index in range(10)}


def test_samples_are_named_by_seed_and_not_by_engine_or_order(tree):
    """The same seeds from one-group-at-a-time and many-at-once give the same tokens (batch-invariant engine)."""
    _, all_at_once = run_here(tree(schedule__periods=1))
    _, in_order = run_here(tree(schedule__periods=1, schedule__mode="synchronous", rollout__group_size=4))
    one, other = (
        {group.index: (group.seed, group.answer.responses) for group in witness.groups}
        for witness in (all_at_once, in_order)
    )
    assert one == other
    assert all(seed == group_seed(7, 0, index) and 0 <= seed < 2**62 for index, (seed, _) in one.items())
