"""What a run wrote down comes back bit for bit; a torn tail is dropped, damage is named."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rondo.errors import JournalError
from rondo.rollout.journal import (
    CHECK,
    FRAME,
    MAGIC,
    PENDING,
    Journal,
    RecordedMicro,
    forget_periods,
    read_period,
    recorded_paths,
    recorded_periods,
)
from rondo.rollout.record import pack_group, unpack_group
from rondo.trainer.accounted import Accounted
from rondo.types import Group, MicroBatch, Part, Response, StepHashes
from tests.conftest import make_group

HASHES = StepHashes(gradient="a", weights="b", norm=0.1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def groups(draw) -> Group:
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
    responses = draw(st.lists(ids, min_size=1, max_size=4))
    group = make_group(period=draw(st.integers(0, 9)), prompt=draw(ids), responses=responses)
    width = draw(st.sampled_from((32, 64)))
    logps = [draw(st.lists(st.floats(-50, 0, width=width), min_size=len(r), max_size=len(r))) for r in responses]
    answers = tuple(
        Response(token_ids=tuple(r), logps=tuple(values), stopped=draw(st.booleans()))
        for r, values in zip(responses, logps, strict=True)
    )
    scores = tuple(draw(NUMBERS) for _ in responses)
    return dataclasses.replace(
        group,
        seed=draw(st.integers(0, 2**62 - 1)),
        prompt=dataclasses.replace(
            group.prompt, text=draw(st.text()), columns={"answer": draw(st.text())}, messages=({"role": "user"},)
        ),
        answer=dataclasses.replace(group.answer, responses=answers),
        rewards=scores,
        advantages=tuple(draw(NUMBERS) for _ in responses),
        reward_parts={"a": scores, "b": scores},
        asked_at=draw(NUMBERS),
        place=draw(st.none() | st.integers(0, 5)),
    )


@given(group=groups(), kept=st.booleans())
def test_a_group_comes_back_as_the_same_bits(group, kept):
    assert unpack_group(pack_group(group, kept)) == (group, kept)


def write(folder, *, period=0, count=3, end=True, keep=0):
    journal = Journal(folder=folder, header={"ranks": 1}, keep=keep, published=lambda: "checksum")
    members = [make_group(period=period, index=index) for index in range(count)]
    for group in members:
        journal.group(group, kept=group.index != 1)
    kept = [group for group in members if group.index != 1]
    journal.micro(MicroBatch(parts=(Part(group=kept[0], first=0, last=1),)))
    journal.micro(MicroBatch(parts=(Part(group=kept[0], first=1, last=2),), skipped=tuple(kept[1:])))
    journal.step(HASHES)
    if end:
        journal.finish({"groups": 3})
    journal.close()
    return members, recorded_paths(folder)[-1]


def test_a_period_comes_back_as_it_was_written(tmp_path):
    members, _ = write(tmp_path, period=4)
    found = read_period(tmp_path, 4)
    assert found.complete
    assert found.end == {"groups": 3}
    assert (found.groups, found.filtered) == ((members[0], members[2]), (members[1],))
    assert found.header == {"ranks": 1, "period": 4, "published": "checksum"}
    (update,) = found.updates
    assert update.hashes == HASHES
    assert update.micros[0] == RecordedMicro(parts=((0, 0, 1),), skipped=())
    rebuilt = update.micros[1].rebuilt({group.index: group for group in members})
    assert rebuilt == MicroBatch(parts=(Part(group=members[0], first=1, last=2),), skipped=(members[2],))


def test_an_interrupted_period_is_what_was_written_before(tmp_path):
    write(tmp_path, end=False)
    found = read_period(tmp_path, 0)
    assert not found.complete
    assert len(found.updates) == 1


def test_what_is_about_to_be_trained_is_on_disk_before_it_is(tmp_path):
    """Nothing is closed here: the process may die in the next instruction."""
    journal = Journal(folder=tmp_path, header={})
    members = [make_group(index=index) for index in range(3)]
    seen = []

    class Dying:
        hashes = None

        def accumulate(self, micro):
            seen.append(read_period(tmp_path, 0))

        def step(self):
            seen.append(read_period(tmp_path, 0))

    for group in members:
        journal.group(group, kept=True)
    trainer = Accounted(Dying(), journal)
    trainer.accumulate(MicroBatch(parts=(Part(group=members[1], first=0, last=2),)))
    trainer.step()
    assert [len(found.groups) for found in seen] == [3, 3]
    assert seen[0].unfinished == (RecordedMicro(parts=((1, 0, 2),), skipped=()),)
    journal.close()


def test_groups_do_not_pile_up_in_memory(tmp_path):
    journal = Journal(folder=tmp_path, header={})
    for index in range(3 * PENDING):
        journal.group(make_group(index=index), kept=True)
    journal.close()
    assert len(read_period(tmp_path, 0).groups) == 3 * PENDING


def test_a_group_that_comes_after_a_while_is_on_disk_at_once(tmp_path):
    """Where groups take minutes, a kill costs none of them; the next one is as far away as the clock says."""
    now = 0.0
    journal = Journal(folder=tmp_path, header={}, clock=lambda: now)
    for index, seconds in enumerate([0.1, 10.0, 10.0, -3600.0, 3700.0]):  # also when the clock is set back
        now += seconds
        journal.group(make_group(index=index), kept=True)
        assert len(read_period(tmp_path, 0).groups) == [0, 2, 3, 3, 5][index]
    journal.close()


def test_a_resumed_period_begins_with_the_groups_it_had(tmp_path):
    """The old file is replaced by one that holds them all: a second kill loses nothing that the first one left."""
    members, _ = write(tmp_path, end=False)
    interrupted = read_period(tmp_path, 0)
    journal = Journal(folder=tmp_path, header={"ranks": 2})
    journal.carry(interrupted)
    journal.group(dataclasses.replace(members[2], asked_at=7.0), kept=True)
    found = read_period(tmp_path, 0)
    assert found.header["ranks"] == 2
    assert [group for group, _ in found.settled] == members  # before any was settled again
    assert [kept for _, kept in found.settled] == [True, False, True]
    assert not found.updates
    journal.group(make_group(index=3), kept=True)
    journal.group(members[0], kept=True)
    journal.close()
    assert [group.index for group, _ in read_period(tmp_path, 0).settled] == [0, 1, 2, 3]
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["period-000000.journal"]


def test_a_file_cut_anywhere_is_a_prefix_of_the_records(tmp_path):
    _, path = write(tmp_path)
    data = path.read_bytes()
    sizes = set()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        found = read_period(tmp_path, 0)
        assert not found.complete
        sizes.add(len(found.groups) + len(found.filtered))
    assert sizes == {0, 1, 2, 3}
    path.write_bytes(data[:-20] + bytes(4096))  # what a file system may leave after power loss
    assert len(read_period(tmp_path, 0).updates) == 1


def test_a_changed_byte_before_the_last_record_is_an_error_with_a_name(tmp_path):
    _, path = write(tmp_path)
    data = path.read_bytes()
    last = data.rindex(b'{"groups"') - FRAME.size - CHECK.size
    for place in range(len(MAGIC), last):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        with pytest.raises(JournalError, match="damaged"):
            read_period(tmp_path, 0)


def test_a_period_that_was_not_recorded_is_named(tmp_path):
    with pytest.raises(JournalError, match="has none"):
        read_period(tmp_path, 3)
    write(tmp_path, period=1)
    with pytest.raises(JournalError, match="no journal of period 3: it holds 1 to 1"):
        read_period(tmp_path, 3)


def test_old_periods_go_and_a_resumed_run_forgets_what_it_trains_again(tmp_path):
    for period in range(5):
        write(tmp_path, period=period, keep=3)
    assert recorded_periods(tmp_path) == [2, 3, 4]
    forget_periods(tmp_path, 3)
    assert recorded_periods(tmp_path) == [2]
