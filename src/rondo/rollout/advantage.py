"""Advantages of one group: known as soon as the group is whole. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6


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
