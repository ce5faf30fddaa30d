"""Queue, packing and loader: whole groups in, micro-batches out, nothing lost or doubled."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.errors import EngineError, Interrupted, RondoError
from rondo.observe.diagnosis import Waits
from rondo.observe.lane import Lane
from rondo.stream.loader import Loader, LoaderSettings
from rondo.stream.packing import packs, parts_of, whole
from rondo.stream.queue import GroupQueue
from rondo.types import Group, MicroBatch, Shortfall
from tests.conftest import make_group

lengths = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=12)


def groups_of(shapes) -> list[Group]:
    return [
        make_group(index=index, responses=[[1] * length for length in shape], advantages=[1.0] * len(shape))
        for index, shape in enumerate(shapes)
    ]


def loader_over(
    groups, *, updates=1, budget=32, synchronous=False, prompt_order=False, arrival=None, waits=None, finish=None
):
    queue = GroupQueue()
    for group in arrival or groups:
        queue.put(group)
    return Loader(
        queue=queue,
        settings=LoaderSettings(
            groups=len(groups),
            updates=updates,
            micro_tokens=budget,
            synchronous=synchronous,
            prompt_order=prompt_order,
        ),
        has_gradient=lambda group: any(group.advantages),
        lane=Lane(),
        waits=waits,
        finish=finish,
    )


def trained(updates: list[list[MicroBatch]]) -> list[tuple[int, int]]:
    return [
        (part.group.index, sample)
        for update in updates
        for micro in update
        for part in micro.parts
        for sample in range(part.first, part.last)
    ]


@given(shapes=lengths, budget=st.integers(4, 40), data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_sample_is_handed_out_exactly_once_in_every_mode(shapes, budget, data):
    groups = groups_of(shapes)
    arrival = data.draw(st.permutations(groups))
    updates = data.draw(st.integers(1, len(groups)))
    modes = {"synchronous": data.draw(st.booleans()), "prompt_order": data.draw(st.booleans())}
    loader = loader_over(groups, updates=updates, budget=budget, arrival=arrival, **modes)
    handed = [list(update) for update in loader.updates(0)]
    everything = {(group.index, sample) for group in groups for sample in range(len(group.answer.responses))}
    assert len(handed) == updates
    assert sorted(trained(handed)) == sorted(everything)
    for number, update in enumerate(handed):
        for micro in update:
            assert sum(part.tokens for part in micro.parts) <= budget or len(micro.parts) == 1
            assert all(part.group.index * updates // len(groups) == number for part in micro.parts)


@given(shapes=lengths, budget=st.integers(4, 40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_in_prompt_order_the_packs_do_not_depend_on_arrival_or_schedule(shapes, budget, data):
    groups = groups_of(shapes)
    variants = []
    for synchronous in (True, False):
        arrival = data.draw(st.permutations(groups))
        loader = loader_over(groups, budget=budget, synchronous=synchronous, prompt_order=True, arrival=arrival)
        variants.append([[micro.parts for micro in update] for update in loader.updates(0)])
    assert variants[0] == variants[1]


def test_the_synchronous_loader_yields_nothing_before_the_last_group():
    groups = groups_of([[1], [1], [1]])
    loader = loader_over(groups, synchronous=True, arrival=groups[:2])
    first = []
    thread = threading.Thread(target=lambda: first.extend(next(loader.updates(0))), daemon=True)
    thread.start()
    thread.join(timeout=0.2)
    assert thread.is_alive()
    assert not first
    loader._queue.put(groups[2])
    thread.join(timeout=5)
    assert len(trained([first])) == 3


@pytest.mark.parametrize("prompt_order", [True, False])
@pytest.mark.parametrize("updates", [1, 2])
def test_advantages_that_need_the_whole_period_are_finished_before_anything_is_trained(prompt_order, updates):
    groups = groups_of([[1], [1], [1]])
    seen = []

    def finish(whole):
        seen.append([group.index for group in whole])
        return [dataclasses.replace(group, advantages=(float(group.index),)) for group in whole]

    arrival = [groups[2], groups[0], groups[1]]
    loader = loader_over(groups, arrival=arrival, finish=finish, prompt_order=prompt_order, updates=updates)
    handed = [list(update) for update in loader.updates(0)]
    assert seen == [[0, 1, 2]]
    assert {part.group.advantages for update in handed for micro in update for part in micro.parts} == {(1.0,), (2.0,)}
    assert [group.index for micro in handed[0] for group in micro.skipped] == [0]


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("prompt_order", [True, False])
def test_a_shortfall_ends_the_period_with_the_groups_that_came(updates, synchronous, prompt_order):
    """Six were wanted, candidates 2, 5, 6 and 9 passed the filter."""
    kept = [dataclasses.replace(groups_of([[1]] * 10)[index], place=place) for place, index in enumerate([2, 5, 6, 9])]
    loader = loader_over(
        groups_of([[1]] * 6),
        arrival=[*kept, Shortfall(period=0, groups=4)],
        updates=updates,
        synchronous=synchronous,
        prompt_order=prompt_order,
    )
    handed = [trained([list(update)]) for update in loader.updates(0)]
    indices = [[index for index, _ in update] for update in handed]
    assert indices == ([[2, 5, 6, 9]] if updates == 1 else [[2, 5], [6, 9], []])


def test_groups_that_are_certain_before_their_place_is_known_are_trained_as_they_come():
    candidates = groups_of([[1]] * 9)
    loader = loader_over(candidates[:3], arrival=[candidates[8], candidates[4]])
    micro = next(next(loader.updates(0)))
    assert [part.group.index for part in micro.parts] == [8, 4]


def test_the_periodic_loader_yields_the_first_group_while_others_are_missing():
    groups = groups_of([[1], [1], [1]])
    loader = loader_over(groups, arrival=groups[2:])
    micro = next(next(loader.updates(0)))
    assert [part.group.index for part in micro.parts] == [2]


def test_groups_without_gradient_are_counted_but_not_run():
    groups = [*groups_of([[1], [1]]), make_group(index=2, responses=[[1], [1]], advantages=[0.0, 0.0])]
    for prompt_order in (True, False):
        update = list(next(loader_over(groups, prompt_order=prompt_order).updates(0)))
        assert [group.index for micro in update for group in micro.skipped] == [2]
        assert len(trained([update])) == 2


def test_a_group_that_comes_twice_or_from_another_period_is_refused():
    groups = groups_of([[1], [1]])
    with pytest.raises(RondoError, match="twice"):
        list(next(loader_over(groups, arrival=[groups[0], groups[0]]).updates(0)))
    with pytest.raises(RondoError, match="by mistake"):
        list(next(loader_over(groups, arrival=[make_group(period=1)]).updates(0)))


def test_a_wait_can_say_what_it_waits_for():
    groups, waits, said = groups_of([[1], [1]]), Waits(), []

    def look() -> None:
        said.extend(waits.lines())
        loader._queue.put(groups[1])

    loader = loader_over(groups, arrival=groups[:1], waits=waits)
    threading.Timer(0.2, look).start()
    list(next(loader.updates(0)))
    assert said == ["waiting for groups from the producer, for 0 s: period 0: 1 of 2 groups (1)"]
    assert not waits.lines()


def test_a_failed_queue_raises_its_first_reason_in_the_waiting_thread():
    queue = GroupQueue()
    threading.Timer(0.05, queue.fail, [EngineError("the engine burned")]).start()
    with pytest.raises(EngineError, match="burned"):
        queue.get(seconds=10)
    queue.close()
    queue.put(make_group())
    with pytest.raises(EngineError, match="burned"):
        queue.get(seconds=0)


def test_a_closed_queue_interrupts():
    queue = GroupQueue()
    queue.close()
    with pytest.raises(Interrupted):
        queue.get(seconds=10)


@given(shape=st.lists(st.integers(1, 20), min_size=1, max_size=10), budget=st.integers(4, 40))
def test_a_group_over_the_budget_is_split_by_responses_and_nothing_else(shape, budget):
    group = groups_of([shape])[0]
    parts = parts_of(group, budget)
    assert [response for part in parts for response in part.responses] == list(group.answer.responses)
    assert all(part.tokens <= budget or part.last - part.first == 1 for part in parts)
    assert (group.tokens > budget) or parts == [whole(group)]


def test_packs_are_yielded_as_soon_as_the_next_part_does_not_fit():
    parts = [whole(group) for group in groups_of([[3], [3], [3]])]  # 6 tokens each

    def arriving():
        yield parts[0]
        yield parts[1]
        pytest.fail("the first pack was full already")

    assert next(packs(arriving(), budget=11)) == (parts[0],)
