"""Soft overlong punishment (DAPO, arXiv 2503.14476): a response that nears the limit pays for it, one that was cut pays
in full.

    R_length(o) = 0                                  where |o| <= L_max - L_cache
                  ((L_max - L_cache) - |o|) / L_cache   in the last L_cache tokens: 0 down to -1
"""

from __future__ import annotations


def overlong_penalty(length: int, *, limit: int, buffer: int) -> float:
    """What is added to the reward of a response of this length: 0 to -1. `limit` is L_max, `buffer` L_cache."""
    return -max(0.0, min(1.0, (length - (limit - buffer)) / buffer)) if buffer else 0.0
