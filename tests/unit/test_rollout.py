"""Advantages, seeds and the producer's thread."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rondo.rollout.advantage import EPSILON, group_advantages, leave_one_out, whiten
from rondo.rollout.background import Background
from rondo.rollout.overlong import overlong_penalty
from rondo.rollout.producer import _all
from rondo.rollout.seeds import group_seed
from tests.conftest import make_group

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


@given(rewards=rewards)
def test_advantages_are_centred_and_scaled_by_the_samples_deviation(rewards):
    found = group_advantages(rewards, scale=True)
    if min(rewards) == max(rewards):
        assert found == (0.0,) * len(rewards)
        return
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    for value, reward in zip(found, rewards, strict=True):
        assert math.isclose(value, (reward - mean) / (deviation + EPSILON), rel_tol=1e-6, abs_tol=1e-6)


@given(rewards=rewards)
def test_unscaled_advantages_sum_to_zero(rewards):
    assert math.isclose(sum(group_advantages(rewards, scale=False)), 0, abs_tol=1e-9)


def test_a_group_of_one_has_no_advantage():
    assert group_advantages([0.7], scale=True) == (0.0,)


@given(rewards=rewards)
def test_leave_one_out_compares_each_reward_with_the_mean_of_the_others(rewards):
    for i, value in enumerate(leave_one_out(rewards)):
        others = rewards[:i] + rewards[i + 1 :]
        assert math.isclose(value, rewards[i] - statistics.fmean(others), rel_tol=1e-9, abs_tol=1e-9)


@given(batches=st.lists(rewards, min_size=1, max_size=5), data=st.data())
def test_whitening_is_over_all_tokens_of_the_period_and_blind_to_order(batches, data):
    lengths = [[data.draw(st.integers(1, 4)) for _ in batch] for batch in batches]
    groups = [
        dataclasses.replace(
            make_group(index=index, responses=[[1] * length for length in lengths[index]]), rewards=tuple(batch)
        )
        for index, batch in enumerate(batches)
    ]
    everything = [
        reward
        for batch, counts in zip(batches, lengths, strict=True)
        for reward, count in zip(batch, counts, strict=True)
        for _ in range(count)
    ]
    found = whiten(groups, scale=True)
    mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    for group in found:
        for value, reward in zip(group.advantages, group.rewards, strict=True):
            assert math.isclose(value, (reward - mean) / (deviation + EPSILON), rel_tol=1e-6, abs_tol=1e-6)
    shuffled = whiten(data.draw(st.permutations(groups)), scale=True)
    assert sorted(shuffled, key=lambda group: group.index) == found


def test_length_costs_nothing_up_to_the_buffer_and_all_of_it_at_the_limit():
    costs = [overlong_penalty(length, limit=20, buffer=4) for length in (1, 16, 17, 18, 20)]
    assert costs == [0, 0, -0.25, -0.5, -1]
    assert overlong_penalty(20, limit=20, buffer=0) == 0


@given(st.tuples(st.integers(0, 2**40), st.integers(0, 10**6), st.integers(0, 10**9)))
def test_seeds_fit_62_bits_and_depend_on_every_part_of_the_name(name):
    seed = group_seed(*name)
    assert 0 <= seed < 2**62
    assert seed == group_seed(*name)
    neighbours = [group_seed(*(part + (place == moved) for place, part in enumerate(name))) for moved in range(3)]
    assert len({seed, *neighbours, group_seed(*name, purpose="eval")}) == 5


def test_a_failing_background_task_is_reported_by_name():
    background, reported, done = Background("test"), [], threading.Event()

    async def fails() -> None:
        raise ValueError("burned")

    def on_error(error: BaseException) -> None:
        reported.append(error)
        done.set()

    background.spawn(fails(), on_error=on_error)
    assert done.wait(5)
    background.close()
    assert isinstance(reported[0], ValueError)


def test_closing_cancels_what_is_left():
    background, cancelled = Background("test"), threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    background.spawn(waits(), on_error=lambda error: None)
    background.call(asyncio.sleep(0.01))
    background.close()
    assert cancelled.is_set()


def test_the_first_failure_cancels_the_others_and_is_raised_as_it_was():
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("slow")

    async def fails() -> None:
        raise ValueError("burned")

    with pytest.raises(ValueError, match="burned"):
        asyncio.run(_all([slow(), fails()]))
    assert ended == ["slow"]
