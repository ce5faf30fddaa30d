"""The soak, short: some twenty faults in one run. `make soak` has the long one."""

from __future__ import annotations

import pytest

from tests.soak.soak import soak


@pytest.mark.heavy
def test_a_run_that_is_hurt_all_the_time_comes_out_as_a_calm_one(tmp_path):
    figures = soak(tmp_path, faults=20, periods=24, seed=5)
    assert figures["faults in all"] >= 20
