"""The soak, short: a dozen faults in one run. `make soak` has the long one."""

from __future__ import annotations

import pytest

from tests.soak.malformed import fire
from tests.soak.soak import soak


@pytest.mark.heavy
def test_a_run_that_is_hurt_all_the_time_comes_out_as_a_calm_one(tmp_path):
    figures = soak(tmp_path, faults=12, periods=14, seed=5)
    assert figures["faults in all"] >= 12


@pytest.mark.heavy
def test_malformed_requests_get_an_answer_and_change_nothing():
    statuses = fire(200, seed=1)
    assert sum(statuses.values()) >= 120
    assert {400, 401} <= statuses.keys()
