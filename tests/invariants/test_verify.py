"""`verify` finds what holds, and what does not: a recorded run, and the same run with its record or code changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from rondo.config import parse_config
from rondo.errors import JournalError
from rondo.rollout.journal import Journal, read_period
from rondo.types import MicroBatch, Part
from rondo.verify.account import all_violations
from rondo.verify.compare import Rounding, bound, difference
from rondo.verify.start import find_start
from tests.conftest import make_group
from tests.invariants.harness import run_here, verified_here


def lines_of(certificate):
    return {(line.what, line.name): line for line in certificate.lines}


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"schedule__order": "prompt"},
        {"trainer__accumulation": "exact"},
        {"schedule__order": "prompt", "schedule__updates_per_period": 2, "algorithm__name": "dapo"},
        pytest.param(
            {"algorithm__filter": "nonzero-spread", "rollout__prompts_per_period": 6}, marks=pytest.mark.heavy
        ),
        pytest.param({"algorithm__name": "reinforce++"}, marks=pytest.mark.heavy),
        pytest.param({"trainer__lora": {"rank": 4}, "algorithm__kl": {"coefficient": 0.1}}, marks=pytest.mark.heavy),
        pytest.param(
            {"trainer__dtype": "bfloat16", "schedule__order": "prompt", "weights__probe_gap": 0.1},
            marks=pytest.mark.heavy,
        ),
    ],
    ids=["arrival", "prompt", "exact", "updates", "filter", "whole-period", "adapters", "bfloat16"],
)
def test_what_each_mode_promises_holds(tree, tmp_path, mode):
    run_here(tree(**mode))
    certificate = verified_here(tmp_path / "run")
    assert certificate.holds, [line for line in certificate.lines if not line.holds]
    lines = lines_of(certificate)
    same_bits = bool({"schedule__order", "trainer__accumulation"} & mode.keys())
    for what, name in (
        ("gradient", "recorded arrival"),
        ("gradient", "shuffled arrival"),
        ("weights", "after the period"),
    ):
        assert lines[what, name].promise == ("bits" if same_bits else "bound" if what == "gradient" else "none")
        assert not same_bits or not lines[what, name].differing
    packed = lines["gradient", "packs of 30"]
    assert packed.promise == "bound"
    assert packed.relative < 1e-4 or packed.worst[0]["norm"] < 1e-6 or "trainer__dtype" in mode
    assert lines["hashes", "recorded order and packs"].comparisons == 2 * mode.get("schedule__updates_per_period", 1)


def doctored(folder: Path, period: int, change) -> None:
    """Write the period's journal again, with its groups (index to group) and its micro-batches changed."""
    found = read_period(folder, period)
    groups = {group.index: group for group in found.groups}
    (update,) = found.updates
    micros = [micro.rebuilt(groups) for micro in update.micros]
    micros = change(groups, micros) or micros
    journal = Journal(folder=folder, header={key: value for key, value in found.header.items() if key != "period"})
    for group in groups.values():
        journal.group(group, kept=True)
    for micro in micros:
        journal.micro(micro)
    journal.step(update.hashes)
    journal.finish(found.end)


def first_with_gradient(micros):
    return next(number for number, micro in enumerate(micros) if micro.parts)


def lose(groups, micros):
    place = first_with_gradient(micros)
    return [
        *micros[:place],
        MicroBatch(parts=micros[place].parts[1:], skipped=micros[place].skipped),
        *micros[place + 1 :],
    ]


def double(groups, micros):
    return [*micros, MicroBatch(parts=micros[first_with_gradient(micros)].parts[:1])]


def halve(groups, micros):
    part = micros[first_with_gradient(micros)].parts[0]
    cut = Part(group=part.group, first=part.first, last=part.last - 1)
    return [MicroBatch(parts=tuple(cut if other == part else other for other in micro.parts), skipped=micro.skipped)
            for micro in micros]  # fmt: skip


def reorder(groups, micros):
    return list(reversed(micros))


@pytest.fixture
def recorded(tree, tmp_path):
    run_here(tree(schedule__periods=1))
    return tmp_path / "run"


@pytest.mark.parametrize("change", [lose, double, halve])
def test_a_sample_that_is_lost_or_doubled_is_more_than_rounding_and_no_longer_accounted_for(recorded, change):
    doctored(recorded, 0, change)
    lines = lines_of(verified_here(recorded, synchronous_chain=False, packings=(), trials=1))
    assert not lines["journal", "one version, fixed set, each once"].holds
    assert not lines["hashes", "recorded order and packs"].holds
    assert not lines["gradient", "recorded arrival"].holds
    assert lines["gradient", "recorded arrival"].of_bound > 10
    assert lines["gradient", "shuffled arrival"].holds  # the groups themselves are all there


def test_another_order_of_the_same_packs_is_rounding_but_other_bits_than_recorded(recorded):
    doctored(recorded, 0, reorder)
    lines = lines_of(verified_here(recorded, synchronous_chain=False, packings=(), trials=0))
    assert lines["gradient", "recorded arrival"].holds
    assert not lines["hashes", "recorded order and packs"].holds


def forget(groups, micros):
    lost = groups.pop(max(groups))
    return [
        MicroBatch(
            parts=tuple(part for part in micro.parts if part.group != lost),
            skipped=tuple(group for group in micro.skipped if group != lost),
        )
        for micro in micros
    ]


def test_a_group_that_the_record_lacks_is_missed(recorded):
    doctored(recorded, 0, forget)
    lines = lines_of(verified_here(recorded, synchronous_chain=False, packings=(), trials=0))
    assert lines["journal", "one version, fixed set, each once"].remark == "period 0: 1 groups are missing"
    assert not lines["hashes", "recorded order and packs"].holds


def other_version(groups, micros):
    group = groups[0]
    groups[0] = dataclasses.replace(group, answer=dataclasses.replace(group.answer, version=(0, 1)))


def other_seed(groups, micros):
    groups[0] = dataclasses.replace(groups[0], seed=groups[0].seed + 1)


def test_another_version_or_seed_in_the_record_is_seen(recorded):
    config = parse_config(json.loads((recorded / "config.json").read_text()))
    sentences = ["period 0: groups [0] were sampled from another version"]
    doctored(recorded, 0, other_version)
    assert all_violations(config, [read_period(recorded, 0)]) == sentences
    sentences.append("period 0: groups [0] were drawn with other seeds than their own")
    doctored(recorded, 0, other_seed)
    assert all_violations(config, [read_period(recorded, 0)]) == sentences


def test_a_replay_starts_from_the_nearest_checkpoint_that_the_journal_reaches(tmp_path):
    for period in range(5):
        journal = Journal(folder=tmp_path, header={})
        journal.group(make_group(period=period), True)
        journal.finish({})
    for period in (2, 4):
        (tmp_path / "checkpoints" / f"period-{period:06d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"period-{period:06d}" / "progress.json").write_text(
            json.dumps({"period": period, "steps": 2 * period})
        )
    assert find_start(tmp_path, first=None, count=None).chain == (0, 1, 2, 3, 4)
    start = find_start(tmp_path, first=3, count=1)
    assert (start.path[-13:], start.steps, start.chain, start.wanted) == ("period-000002", 4, (2, 3), (3,))
    (tmp_path / "journal" / "period-000000.journal").unlink()
    assert find_start(tmp_path, first=None, count=None).chain == (2, 3, 4)
    with pytest.raises(JournalError, match="cannot be trained again from period 1"):
        find_start(tmp_path, first=1, count=1)
    with pytest.raises(JournalError, match="holds 1 complete periods from period 4 on, not 2"):
        find_start(tmp_path, first=4, count=2)


def test_a_difference_is_told_in_bits_units_and_norms():
    reference = torch.tensor([1.0, 0.0, -2.0])
    found = torch.tensor([1.0 + 2**-23, -0.0, -2.0])
    told = difference("x", found, reference)
    assert (told.differing, told.ulps, told.elements) == (2, 1, 3)
    assert told.relative == pytest.approx(2**-23 / 5**0.5)
    across = difference("x", torch.tensor([2.0**-149]), torch.tensor([-(2.0**-149)]))
    assert across.ulps == 3  # the smallest numbers, with both zeros between them


def test_the_bound_is_the_sums_error_and_that_of_the_passes():
    rounding = Rounding(error=1.0, absolute=2.0**24, unit=2.0**-24)
    assert bound(rounding, micros=1) == 9.0
    assert bound(rounding, micros=11) == pytest.approx(9.0 + 10.0, rel=1e-5)
