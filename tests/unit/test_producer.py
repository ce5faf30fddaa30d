"""The producer beside fake engines and rewards: what it keeps, where the next period starts, what it aborts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from rondo.errors import EngineError
from rondo.rewards.runner import Scores
from rondo.rollout.advantage import advantages_of
from rondo.rollout.background import Background
from rondo.rollout.filters import FilterSettings
from rondo.rollout.journal import RecordedPeriod
from rondo.rollout.producer import Producer, ProducerSettings
from rondo.rollout.recall import Recalled
from rondo.stream.queue import GroupQueue
from rondo.types import Answer, Group, Prompt, Response, Sampling, Shortfall

SAMPLING = Sampling(temperature=1.0, max_tokens=10, stop_token_ids=(0,))


class FakePool:
    """Answers after a random while; the prompt's one token is its ordinal."""

    def __init__(self, seed: int, slow: frozenset[int] = frozenset()) -> None:
        self.asked: list[int] = []
        self.aborted: list[int] = []
        self._slow = slow
        self._draw = random.Random(seed)

    async def generate(self, prompt, *, n, seed, sampling, version):
        (ordinal,) = prompt
        self.asked.append(ordinal)
        try:
            await asyncio.sleep(3600 if ordinal in self._slow else self._draw.uniform(0, 0.02))
        except asyncio.CancelledError:
            self.aborted.append(ordinal)
            raise
        responses = tuple(
            Response(token_ids=(ordinal,) * (6 + number), logps=(-1.0,) * (6 + number), stopped=True)
            for number in range(n)
        )
        return Answer(engine="fake", boot="boot", version=(version, version), responses=responses)


class FakeAccounts:
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def asked(self, index, samples):
        self.told.append(("asked", index))

    def answered(self, index):
        self.told.append(("answered", index))

    def reused(self, index, samples):
        self.told.append(("reused", index))


class FakeScorer:
    """A group's rewards differ where its ordinal is not a multiple of three."""

    async def score(self, prompt, completions, completion_ids, columns):
        (ordinal,) = {token for ids in completion_ids for token in ids}
        rewards = tuple(float(number if ordinal % 3 else 1) for number in range(len(completions)))
        return Scores(rewards=rewards, parts={"fake": rewards}, failed=False)


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("test")
    yield made
    made.close()


def prompt_at(start: int):
    return lambda place: Prompt(ordinal=start + place, text="", token_ids=(start + place,), columns={})


def run_period(background, pool, *, groups=4, start=0, recall=None, accounts=None, **settings):
    seen: list[Group] = []
    warnings: list[str] = []
    queue = GroupQueue()
    producer = Producer(
        background=background,
        pool=pool,
        scorer=FakeScorer(),
        queue=queue,
        decode=str,
        settings=ProducerSettings(
            run_seed=0, group_size=2, sampling=SAMPLING, advantages=advantages_of("grpo", scale=True), **settings
        ),
        accounts=accounts or FakeAccounts(),
        recall=recall or Recalled(),
        on_group=lambda group, kept: seen.append(group),
        on_shortfall=warnings.append,
    )
    producer.begin(0, prompt_at(start), groups=groups)
    used = producer.finish()
    arrived = []
    while (one := queue.get(seconds=0)) is not None:
        arrived.append(one)
    return producer, used, arrived, seen, warnings


@pytest.mark.parametrize("seed", range(5))
def test_without_a_filter_every_group_is_trained(background, seed):
    _, used, arrived, seen, _ = run_period(background, FakePool(seed))
    assert used == 4
    assert sorted(group.index for group in arrived) == [0, 1, 2, 3]
    assert seen == arrived


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("oversample", [1.0, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_first_groups_that_differ_are_kept_in_prompt_order(background, seed, oversample, in_order):
    """From ordinal 5 on, 5 7 8 10 differ: six prompts are needed, and the next period starts at 11."""
    settings = FilterSettings(oversample=oversample, limit=40, in_order=in_order)
    producer, used, arrived, seen, _ = run_period(background, FakePool(seed), start=5, filter=settings)
    assert used == 6
    assert sorted(group.prompt.ordinal for group in arrived) == [5, 7, 8, 10]
    assert sorted(group.index for group in seen) == list(range(6))
    if in_order:
        assert [(group.index, group.place) for group in arrived] == [(0, 0), (2, 1), (3, 2), (5, 3)]
    assert producer.unneeded == len(set(producer._pool.asked)) - 6


def test_what_is_still_generating_when_the_period_is_full_is_aborted(background):
    pool = FakePool(0, slow=frozenset(range(6, 12)))
    settings = FilterSettings(oversample=3.0, limit=40, in_order=False)
    _, used, arrived, _, _ = run_period(background, pool, filter=settings)
    assert used == 6  # 1 2 4 5
    assert len(arrived) == 4
    assert sorted(pool.aborted) == list(range(6, 12))


def test_a_period_that_stays_short_says_so_to_the_loader_and_to_people(background):
    settings = FilterSettings(oversample=1.5, limit=5, in_order=False)
    _, used, arrived, _, warnings = run_period(background, FakePool(0), filter=settings)
    assert used == 5
    assert sorted(group.index for group in arrived[:-1]) == [1, 2, 4]
    assert arrived[-1] == Shortfall(period=0, groups=3)
    assert warnings == [
        "period 0 trains 3 groups instead of 4: no more of its 5 candidates have rewards that differ "
        "(algorithm.max_candidates)"
    ]


def test_length_costs_reward_but_not_membership(background):
    """Responses of 6 and 7 tokens, a limit of 10, a buffer of 4: the second loses a quarter."""
    settings = FilterSettings(oversample=1.5, limit=40, in_order=True)
    _, _, arrived, seen, _ = run_period(background, FakePool(0), filter=settings, overlong_buffer=4)
    assert {group.rewards for group in arrived} == {(0.0, 0.75)}
    assert {group.reward_parts["overlong"] for group in arrived} == {(0.0, -0.25)}
    assert {group.rewards for group in seen if group.index % 3 == 0} == {(1.0, 0.75)}  # equal but for their lengths


def test_a_failure_among_the_candidates_fails_the_queue_and_aborts_the_others(background):
    class Failing(FakePool):
        async def generate(self, prompt, **options):
            if prompt == (2,):
                raise EngineError("the engine burned")
            return await super().generate(prompt, **options)

    pool = Failing(0, slow=frozenset({0, 1, 3, 4, 5}))
    with pytest.raises(EngineError, match="burned"):
        run_period(background, pool, filter=FilterSettings(oversample=1.5, limit=40, in_order=False))
    assert sorted(pool.aborted) == [0, 1, 3, 4, 5]


def test_what_is_given_up_is_aborted_in_silence(background):
    pool, queue = FakePool(0, slow=frozenset(range(4))), GroupQueue()
    producer = Producer(
        background=background,
        pool=pool,
        scorer=FakeScorer(),
        queue=queue,
        decode=str,
        settings=ProducerSettings(
            run_seed=0, group_size=2, sampling=SAMPLING, advantages=advantages_of("grpo", scale=True)
        ),
        accounts=FakeAccounts(),
        on_group=lambda group, kept: None,
        on_shortfall=pytest.fail,
    )
    producer.abandon()  # nothing was begun: nothing happens
    producer.begin(0, prompt_at(0), groups=4)
    background.call(asyncio.sleep(0.01))
    producer.abandon()
    background.call(asyncio.sleep(0.01))
    assert sorted(pool.aborted) == [0, 1, 2, 3]
    queue.raise_if_over()


@pytest.mark.parametrize("filtered", [False, True])
def test_what_the_journal_holds_is_not_generated_again(background, filtered):
    """The rest is; what is trained, and where the next period starts, is what it would have been."""
    settings = {"filter": FilterSettings(oversample=1.5, limit=40, in_order=True)} if filtered else {}
    _, used, whole, seen, _ = run_period(background, FakePool(0), **settings)
    kept = {group.index for group in whole}
    before = [group for group in seen if group.index in (0, 2)]
    interrupted = RecordedPeriod(
        period=0,
        header={},
        groups=tuple(group for group in before if group.index in kept),
        filtered=tuple(group for group in before if group.index not in kept),
        updates=(),
    )
    recalled, accounts, pool = Recalled(), FakeAccounts(), FakePool(1)
    recalled.hold(interrupted)
    _, used_again, again, _, _ = run_period(background, pool, recall=recalled, accounts=accounts, **settings)

    def told(groups):
        return sorted((group.index, group.place, group.seed, group.answer, group.rewards) for group in groups)

    assert told(again) == told(whole)
    assert used_again == used
    assert 0 not in pool.asked
    assert 2 not in pool.asked
    assert [index for what, index in accounts.told if what == "reused"] == [0, 2]
    assert {index for what, index in accounts.told if what == "asked"} == set(pool.asked)
