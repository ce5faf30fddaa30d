"""Dynamic sampling against its definition, by brute force."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.rollout.filters import FilterSettings, Selection, nonzero_spread


def first_that_qualify(verdicts: list[bool], wanted: int) -> list[int]:
    """The definition."""
    return [index for index, qualifies in enumerate(verdicts) if qualifies][:wanted]


def needed(verdicts: list[bool], wanted: int) -> int:
    """Candidates up to the last one that is trained; all of them where there are too few."""
    kept = first_that_qualify(verdicts, wanted)
    return kept[-1] + 1 if len(kept) == wanted else len(verdicts)


@st.composite
def periods(draw):
    wanted = draw(st.integers(1, 4))
    verdicts = draw(st.lists(st.booleans(), min_size=wanted, max_size=9))
    options = FilterSettings(
        oversample=draw(st.sampled_from([1.0, 1.5, 3.0])), limit=len(verdicts), in_order=draw(st.booleans())
    )
    return wanted, verdicts, options, draw(st.randoms(use_true_random=False))


def drive(wanted, verdicts, options, order, *, watch=lambda selection, resolved, found: None):
    """Resolve candidates in a random order of arrival, as far as they were asked for."""
    selection, resolved, found = Selection(wanted=wanted, settings=options), {}, []
    while not selection.complete:
        index = order.choice([index for index in range(selection.asked) if index not in resolved])
        resolved[index] = verdicts[index]
        found += selection.resolve(index, verdicts[index])
        watch(selection, resolved, found)
    return selection, found


@given(periods())
@settings(max_examples=300, deadline=None)
def test_the_first_that_qualify_in_prompt_order_are_kept_whatever_the_order_of_arrival(period):
    wanted, verdicts, options, order = period
    selection, found = drive(wanted, verdicts, options, order)
    kept = [settled.index for settled in found if settled.kept]
    assert sorted(kept) == first_that_qualify(verdicts, wanted)
    assert len(kept) == len(set(kept)) == selection.kept
    assert selection.short == (len(kept) < wanted)
    assert selection.used == needed(verdicts, wanted)
    assert {settled.index for settled in found} == set(range(selection.used))  # each seen once, dropped ones too
    assert len(found) == selection.used


@given(periods())
@settings(max_examples=200, deadline=None)
def test_a_group_is_released_at_the_first_moment_when_it_is_certain_to_be_kept(period):
    """Certain: kept under every way in which the unresolved may turn out."""
    wanted, verdicts, options, order = period

    def watch(selection, resolved, found):
        open_ones = [index for index in range(len(verdicts)) if index not in resolved]
        futures = [
            first_that_qualify(
                [{**resolved, **dict(zip(open_ones, guess, strict=True))}[i] for i in range(len(verdicts))], wanted
            )
            for guess in product([False, True], repeat=len(open_ones))
        ]
        certain = {i for i, qualifies in resolved.items() if qualifies and all(i in future for future in futures)}
        if options.in_order:  # and its place is known: it is the same in every future
            certain = {i for i in certain if len({future.index(i) for future in futures}) == 1}
        assert {settled.index for settled in found if settled.kept} == certain

    drive(wanted, verdicts, options, order, watch=watch)


@given(periods())
@settings(max_examples=200, deadline=None)
def test_in_order_every_kept_group_comes_with_its_place(period):
    wanted, verdicts, options, order = period
    _, found = drive(wanted, verdicts, options, order)
    places = [settled.place for settled in found if settled.kept]
    if options.in_order:
        assert [settled.index for settled in found] == sorted(settled.index for settled in found)
        assert places == list(range(len(places)))
    else:
        assert set(places) <= {None}


@given(periods())
@settings(max_examples=200, deadline=None)
def test_no_more_is_asked_for_while_enough_may_still_qualify(period):
    wanted, verdicts, options, order = period
    asked = Selection(wanted=wanted, settings=options).asked
    assert min(wanted, len(verdicts)) <= asked <= len(verdicts)

    def watch(selection, resolved, found):
        nonlocal asked
        possible = sum(resolved.get(index, True) for index in range(asked))
        assert (selection.asked > asked) == (possible < wanted and asked < len(verdicts))
        asked = selection.asked

    drive(wanted, verdicts, options, order, watch=watch)


def test_a_slow_group_in_front_does_not_hold_back_what_is_certain_behind_it():
    selection = Selection(wanted=3, settings=FilterSettings(oversample=2, limit=9, in_order=False))
    assert [settled.index for settled in selection.resolve(1, True)] == [1]  # 0 may be kept: it is one of two at most
    assert [settled.index for settled in selection.resolve(2, True)] == [2]
    assert selection.resolve(3, True) == []  # 0, 1 and 2 may fill the period
    assert [settled.index for settled in selection.resolve(0, False)] == [0, 3]
    assert selection.complete
    assert selection.used == 4


def test_equal_rewards_have_no_spread():
    assert nonzero_spread([0.0, 1.0])
    assert not nonzero_spread([1.0, 1.0])
