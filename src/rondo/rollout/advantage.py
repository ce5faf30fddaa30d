"""Advantages of one group, known as soon as it is whole, or of one period, known when its last group is.

Pure functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

from rondo.types import Group

EPSILON = 1e-6

Advantages = Callable[[Sequence[float]], tuple[float, ...]]  # of a group's rewards


def group_advantages(rewards: Sequence[float], *, scale: bool) -> tuple[float, ...]:
    """Each reward less the group's mean; with `scale`, over the group's standard deviation (of the sample, as GRPO's
    published code does). Equal rewards give exact zeros, whatever rounding says."""
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not scale:
        return tuple(centred)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return tuple(value / (deviation + EPSILON) for value in centred)


def leave_one_out(rewards: Sequence[float]) -> tuple[float, ...]:
    """RLOO: each reward less the mean of the others, which is G / (G - 1) times its distance from the group's mean."""
    factor = len(rewards) / (len(rewards) - 1)
    return tuple(factor * value for value in group_advantages(rewards, scale=False))


def whiten(groups: Sequence[Group], *, scale: bool) -> list[Group]:
    """REINFORCE++: (r - mean) / std over all tokens of the period, each with its response's reward (of the population,
    as its published code does). The sums are exact (fsum), so the order of the groups does not matter to the last
    bit."""
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards or min(rewards) == max(rewards):
        return [dataclasses.replace(group, advantages=(0.0,) * len(group.rewards)) for group in groups]
    lengths = [len(response.token_ids) for group in groups for response in group.answer.responses]
    counted, total = list(zip(rewards, lengths, strict=True)), sum(lengths)
    mean = math.fsum(reward * length for reward, length in counted) / total
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 * length for reward, length in counted) / total) + EPSILON
    divisor = deviation if scale else 1.0
    return [
        dataclasses.replace(group, advantages=tuple((reward - mean) / divisor for reward in group.rewards))
        for group in groups
    ]


def advantages_of(algorithm: str, *, scale: bool) -> Advantages:
    """The estimator of one group. REINFORCE++ has none: its rewards stay as they are until the period is whole."""
    if algorithm == "reinforce++":
        return tuple
    return leave_one_out if algorithm == "rloo" else partial(group_advantages, scale=scale)
