"""Seeds by name: a sample is asked for by what it is, not by when or where it is generated."""

from __future__ import annotations

import hashlib


def group_seed(run_seed: int, period: int, ordinal: int, purpose: str = "train") -> int:
    """62 bits from (run seed, period, ordinal); sample i uses this + i, as vLLM does for n > 1."""
    digest = hashlib.sha256(f"{purpose} {run_seed} {period} {ordinal}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
