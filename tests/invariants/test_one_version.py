"""Every trained response was sampled from its period's own weights."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import aiohttp
import pytest
import torch

from rondo.engines.client import HttpEngine
from rondo.engines.pool import EnginePool
from rondo.errors import StaleRolloutError
from rondo.types import Sampling
from tests.invariants.harness import run_here

SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(0,))


def engine_state(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url + "/rondo/state") as reply:
        return dict(json.load(reply))


def test_every_trained_response_has_its_periods_version_and_log_probs(tree):
    _, witness = run_here(tree(schedule__periods=3))
    assert {group.period for group in witness.groups} == {0, 1, 2}
    assert all(group.answer.version == (group.period, group.period) for group in witness.groups)
    gap = witness.trainer.tally.read()["logp_gap_max"]
    assert gap < 1e-4  # stale weights would move log-probs by far more: see the next test


def test_weights_that_miss_a_step_move_the_log_prob_gap_far_beyond_rounding(tree):
    """The gap is a check of its own: an engine that lies about its version is seen in it."""
    _, witness = run_here(tree(schedule__periods=1))
    before = [parameter.clone() for parameter in witness.trainer.model.policy.parameters()]
    trainer = witness.trainer
    trainer.begin_period()
    trainer.accumulate(next(micro for micro in witness.micros if micro.parts))
    assert trainer.tally.read()["logp_gap_max"] > 1e-2
    assert all(map(torch.equal, trainer.model.policy.parameters(), before))


def test_a_response_of_another_version_is_refused(engine, tree):
    run_here(tree(schedule__periods=1))  # leaves the engine at version 1

    async def ask(version: int) -> None:
        async with aiohttp.ClientSession() as session:
            pool = EnginePool(max_retries=1, on_retry=lambda error: None)
            await pool.add(HttpEngine(engine, session, seconds=30))
            await pool.generate([3, 4], n=2, seed=1, sampling=SAMPLING, version=version)

    asyncio.run(ask(version=1))
    with pytest.raises(StaleRolloutError, match="version 1 in period 2"):
        asyncio.run(ask(version=2))


def test_every_publication_resets_the_prefix_cache(engine, tree):
    before = engine_state(engine)["prefix_resets"]
    run_here(tree(schedule__periods=2))
    after = engine_state(engine)
    assert after["prefix_resets"] == before + 3  # the start's, and one per period
    assert after["version"] == 2
