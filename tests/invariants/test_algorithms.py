"""Every algorithm through the whole loop, as its name alone sets it up."""

from __future__ import annotations

import pytest
import torch

from rondo.config import parse_config
from tests.invariants.harness import run_here


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "dr-grpo", "entropy_coefficient": 0.01},
        {"name": "dapo", "oversample": 2.0},
        {"name": "gspo", "correction_cap": 2.0},
        {"name": "rloo", "kl": {"coefficient": 0.1}},
        {"name": "reinforce++", "kl": {"coefficient": 0.1}},
        {"name": "cispo"},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_an_algorithm_trains_and_is_on_policy(tree, algorithm):
    config = {**tree(schedule__periods=1), "algorithm": algorithm}
    before, _ = run_here({**config, "trainer": {**config["trainer"], "learning_rate": 1e-30}})
    after, witness = run_here(config)
    read = witness.trainer.tally.read()
    assert not all(map(torch.equal, before, after))
    assert read["clip_fraction"] == 0  # one update per period: every ratio is 1
    for key, metric in (("entropy_coefficient", "policy_entropy"), ("correction_cap", "correction"), ("kl", "kl")):
        assert (metric in read) == (key in algorithm)
    assert len(witness.groups) == parse_config(config).rollout.prompts_per_period
