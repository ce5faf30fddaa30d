"""Rewards for benchmarks: no meaning, but a spread within every group, so that every group is trained."""

from __future__ import annotations

import zlib


def spread(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    return [float(zlib.crc32(repr(ids).encode()) % 97) for ids in completion_ids]
