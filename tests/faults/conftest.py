"""One calm run, which every disturbed one is compared with."""

from __future__ import annotations

import pytest

from tests.faults.runs import EXACT
from tests.integration.harness import Outcome, rondo


@pytest.fixture(scope="session")
def calm(tmp_path_factory) -> Outcome:
    outcome = rondo(tmp_path_factory.mktemp("calm"), *EXACT)
    assert outcome.code == 0, outcome.err
    return outcome
