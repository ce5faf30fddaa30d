"""An account that balances is written down; one that does not stops the run."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from rondo.errors import OnPolicyError
from rondo.observe.ledger import Ledger, LedgerSettings
from rondo.stream.packing import whole
from rondo.types import MicroBatch, Part, Publication, StepHashes
from tests.conftest import make_group

HASHES = StepHashes(gradient="a", weights="b", norm=0.1)


class Shop:
    """A ledger, and what it looks at."""

    def __init__(self, folder, *, groups=2, filtered=False, gap=0.0) -> None:
        self.published = Publication(version=0, checksum="c", engines=1)
        self.folder = folder
        self.ledger = Ledger(
            folder=folder,
            journal=None,
            settings=LedgerSettings(groups=groups, updates=1, filtered=filtered, max_logp_gap=1e-3),
            published=lambda: self.published,
            measured=lambda: {"logp_gap_mean": gap, "logp_gap_max": gap},
        )

    def enter(self, *indexes, kept=True):
        for index in indexes:
            self.ledger.asked(index, 2)
            self.ledger.answered(index)
            self.ledger.group(make_group(index=index), kept)

    def train(self, *indexes):
        self.ledger.micro(MicroBatch(parts=tuple(whole(make_group(index=index)) for index in indexes)))

    def end(self):
        self.ledger.step(HASHES)
        self.published = Publication(version=1, checksum="d", engines=1)
        self.ledger.finish(0)


def test_a_period_that_adds_up_becomes_a_line(tmp_path):
    shop = Shop(tmp_path, groups=3, filtered=True)
    shop.enter(0, 2)
    shop.enter(1, kept=False)
    shop.train(2)
    shop.ledger.micro(MicroBatch(parts=(), skipped=(make_group(index=0),)))
    shop.end()
    line = json.loads((tmp_path / "certificate.jsonl").read_text())
    assert (line["groups"], line["groups_trained"], line["groups_without_gradient"], line["groups_filtered"]) == (
        3, 1, 1, 1,
    )  # fmt: skip
    assert (line["version"], line["published_checksum"], line["next_checksum"]) == (0, "c", "d")
    assert (line["gradient_hashes"], line["weights_hash"], line["samples"]) == (["a"], "b", 4)
    assert line["ledger"] == {
        "asked": 6, "answered": 6, "reused": 0, "unneeded": 0, "filtered": 2, "trained": 4, "retried": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("trained", "wrong"), [([0], r"\[1\]"), ([0, 1, 1], r"\[1\]"), ([0, 1, 2], r"\[2\]"), ([], r"\[0, 1\]")]
)
def test_a_lost_a_doubled_and_a_foreign_group_stop_the_run(tmp_path, trained, wrong):
    shop = Shop(tmp_path)
    shop.enter(0, 1)
    shop.train(*trained)
    with pytest.raises(OnPolicyError, match=f"each sample once: see the groups {wrong}"):
        shop.end()
    assert not (tmp_path / "certificate.jsonl").exists()


def test_every_sample_has_one_origin_and_one_end(tmp_path):
    shop = Shop(tmp_path, groups=2, filtered=True)
    shop.ledger.reused(0, 2)
    shop.ledger.group(make_group(index=0), True)
    shop.enter(1)
    for index in (2, 3):  # candidates beyond the last one needed: one was answered, one aborted
        shop.ledger.asked(index, 2)
    shop.ledger.answered(2)
    shop.train(0, 1)
    shop.end()
    told = json.loads((tmp_path / "certificate.jsonl").read_text())["ledger"]
    assert told == {"asked": 6, "answered": 4, "reused": 2, "unneeded": 4, "filtered": 0, "trained": 4, "retried": 0}
    assert told["asked"] + told["reused"] == told["trained"] + told["filtered"] + told["unneeded"]


def test_a_sample_that_is_asked_answered_or_invented_twice_stops_the_run(tmp_path):
    shop = Shop(tmp_path)
    shop.enter(0)
    with pytest.raises(OnPolicyError, match="group 0 was asked for twice"):
        shop.ledger.reused(0, 2)
    with pytest.raises(OnPolicyError, match="group 0 was answered twice"):
        shop.ledger.answered(0)
    with pytest.raises(OnPolicyError, match="group 1 was answered without having been asked"):
        shop.ledger.answered(1)
    shop.ledger.group(make_group(index=1), True)
    shop.train(0, 1)
    with pytest.raises(OnPolicyError, match=r"settled the groups \[1\] that nobody answered"):
        shop.end()


def test_a_group_that_was_asked_for_and_never_came_stops_the_run(tmp_path):
    shop = Shop(tmp_path, groups=1)
    shop.enter(0)
    shop.ledger.asked(1, 2)
    shop.train(0)
    with pytest.raises(OnPolicyError, match=r"asked for the groups \[1\] and lost them"):
        shop.end()


def test_half_a_group_is_not_a_group(tmp_path):
    shop = Shop(tmp_path, groups=1)
    shop.enter(0)
    shop.ledger.micro(MicroBatch(parts=(Part(group=make_group(), first=0, last=1),)))
    with pytest.raises(OnPolicyError, match="each sample once"):
        shop.end()


def test_a_group_of_another_version_is_not_entered(tmp_path):
    shop = Shop(tmp_path)
    with pytest.raises(OnPolicyError, match=r"sampled from versions \(1, 1\)"):
        shop.ledger.group(make_group(version=1), True)
    with pytest.raises(OnPolicyError, match="the engines hold version 0"):
        shop.ledger.group(make_group(period=1), True)
    shop.enter(0)
    shop.published = dataclasses.replace(shop.published, checksum="other")
    with pytest.raises(OnPolicyError, match="off-policy"):
        shop.enter(1)


def test_a_period_needs_its_whole_set_its_step_and_its_publication(tmp_path):
    shop = Shop(tmp_path)
    shop.enter(0)
    shop.train(0)
    with pytest.raises(OnPolicyError, match="settled 1 groups instead of 2"):
        shop.end()
    shop = Shop(tmp_path, filtered=True)
    shop.enter(0, 2)
    shop.train(0, 2)
    with pytest.raises(OnPolicyError, match=r"left out the groups \[1\]"):
        shop.end()
    shop = Shop(tmp_path)
    shop.enter(0, 1)
    shop.train(0, 1)
    shop.published = Publication(version=1, checksum="d", engines=1)
    with pytest.raises(OnPolicyError, match="took 0 steps"):
        shop.ledger.finish(0)
    shop.ledger.step(HASHES)
    shop.published = Publication(version=0, checksum="d", engines=1)
    with pytest.raises(OnPolicyError, match="ended with version 0 published"):
        shop.ledger.finish(0)


def test_engines_that_compute_other_log_probs_stop_the_run(tmp_path):
    shop = Shop(tmp_path, gap=0.01)
    shop.enter(0, 1)
    shop.train(0, 1)
    with pytest.raises(OnPolicyError, match="they hold other weights"):
        shop.end()


def test_what_is_sampled_differently_on_purpose_is_not_held_to_a_gap(tree):
    from rondo.config import parse_config

    assert parse_config(tree()).logp_gap_limit == 1e-3
    assert parse_config(tree(journal__max_logp_gap=0.5)).logp_gap_limit == 0.5
    off = parse_config(tree(rollout__top_p=0.9, rollout__off_policy_sampling=True))
    assert off.logp_gap_limit == math.inf
