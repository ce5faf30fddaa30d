"""The producer: one period's prompts to the engines, each group out when it is whole and scored.

Runs on the background loop. Consumes prompts, produces groups into the queue (waking the loader), waits for the
engine pool and the reward workers. Whatever fails in it fails the queue: the loader then raises it by name. A group
that the journal of an interrupted run holds is taken from there instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rondo.engines.pool import EnginePool
from rondo.observe.diagnosis import Waits
from rondo.rewards.runner import Scores
from rondo.rollout.advantage import Advantages
from rondo.rollout.background import Background
from rondo.rollout.filters import FilterSettings, Selection, nonzero_spread
from rondo.rollout.overlong import overlong_penalty
from rondo.rollout.seeds import group_seed
from rondo.stream.queue import GroupQueue
from rondo.types import Answer, Group, Prompt, Sampling, Shortfall


class Scorer(Protocol):
    async def score(
        self,
        prompt: str | list[dict[str, Any]],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, Any],
    ) -> Scores: ...


class Accounts(Protocol):
    """Who is told what became of every group's samples."""

    def asked(self, index: int, samples: int) -> None: ...
    def answered(self, index: int) -> None: ...
    def reused(self, index: int, samples: int) -> None: ...


class Recall(Protocol):
    """The group that an interrupted run had settled, and whether it was kept; None: it is to be generated."""

    def __call__(self, period: int, index: int, seed: int, prompt: Prompt, /) -> tuple[Group, bool] | None: ...


@dataclass(frozen=True, kw_only=True)
class ProducerSettings:
    run_seed: int
    group_size: int
    sampling: Sampling
    advantages: Advantages
    overlong_buffer: int = 0  # tokens before the limit in which length costs reward
    filter: FilterSettings | None = None  # None: every group is trained


class Producer:
    def __init__(
        self,
        *,
        background: Background,
        pool: EnginePool,
        scorer: Scorer,
        queue: GroupQueue,
        decode: Callable[[Sequence[int]], str],
        settings: ProducerSettings,
        accounts: Accounts,
        on_group: Callable[[Group, bool], None],
        on_shortfall: Callable[[str], None],
        recall: Recall = lambda period, index, seed, prompt: None,
        waits: Waits | None = None,
    ) -> None:
        self._background = background
        self._pool = pool
        self._scorer = scorer
        self._queue = queue
        self._decode = decode
        self._settings = settings
        self._accounts = accounts
        self._recall = recall
        self._waits = waits or Waits()
        self._on_group = on_group
        self._on_shortfall = on_shortfall
        self._working: Future[int] | None = None
        self.unneeded = 0  # candidates that were asked for beyond the last one needed, in the whole run

    def begin(self, period: int, prompts: Callable[[int], Prompt], *, groups: int) -> None:
        """Start generating the period's prompts, in their order; groups appear in the queue as they finish."""
        if self._settings.filter is None:
            work = self._every(period, [prompts(index) for index in range(groups)])
        else:
            work = self._first(period, prompts, Selection(wanted=groups, settings=self._settings.filter))
        self._working = self._background.spawn(work, on_error=self._queue.fail)

    def finish(self) -> int:
        """How many of the period's prompts were needed; waits until none is being generated any more."""
        assert self._working is not None
        return self._working.result()

    def abandon(self) -> None:
        """Let go of whatever is still being generated: nobody will ask for it."""
        if self._working is not None:
            self._working.cancel()

    def evaluate(self, version: int, prompts: Sequence[Prompt], samples: int) -> list[float]:
        """Mean reward of every held-out prompt under this version; waits for the last."""
        rewards = [0.0] * len(prompts)

        async def score(index: int, prompt: Prompt) -> None:
            seed = group_seed(self._settings.run_seed, version, prompt.ordinal, purpose="eval")
            answer = await self._ask(prompt, n=samples, seed=seed, version=version)
            rewards[index] = sum((await self._score(prompt, answer)).rewards) / samples

        self._background.call(_all(score(index, prompt) for index, prompt in enumerate(prompts)))
        return rewards

    async def _every(self, period: int, prompts: Sequence[Prompt]) -> int:
        async def emit(index: int, prompt: Prompt) -> None:
            group, _ = await self._group(period, index, prompt)
            self._settle(group)

        await _all(emit(index, prompt) for index, prompt in enumerate(prompts))
        return len(prompts)

    async def _first(self, period: int, prompts: Callable[[int], Prompt], selection: Selection) -> int:
        """The first groups that qualify, in prompt order; whatever else is still generating then is aborted."""
        running: set[asyncio.Task[tuple[Group, bool]]] = set()
        groups: dict[int, Group] = {}
        asked = 0
        try:
            while not selection.complete:
                for index in range(asked, selection.asked):
                    running.add(asyncio.create_task(self._group(period, index, prompts(index))))
                asked = selection.asked
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    group, qualifies = task.result()
                    groups[group.index] = group
                    for settled in selection.resolve(group.index, qualifies):
                        self._settle(dataclasses.replace(groups.pop(settled.index), place=settled.place), settled.kept)
            if selection.short:
                self._on_shortfall(_shortfall(period, selection))
                self._queue.put(Shortfall(period=period, groups=selection.kept))
            self.unneeded += asked - selection.used
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return selection.used

    def _settle(self, group: Group, kept: bool = True) -> None:
        """The period needed this group: it is seen by whoever keeps the books, and then trained if it was kept."""
        self._on_group(group, kept)
        if kept:
            self._queue.put(group)

    async def _group(self, period: int, index: int, prompt: Prompt) -> tuple[Group, bool]:
        """A whole, scored group; and whether its rewards differ, before length costs any."""
        asked_at = time.monotonic()
        seed = group_seed(self._settings.run_seed, period, prompt.ordinal)
        if (known := self._recall(period, index, seed, prompt)) is not None:
            self._accounts.reused(index, len(known[0].answer.responses))
            return known
        self._accounts.asked(index, self._settings.group_size)
        answer = await self._ask(prompt, n=self._settings.group_size, seed=seed, version=period)
        self._accounts.answered(index)
        answered_at = time.monotonic()
        scores = await self._score(prompt, answer)
        rewards, parts = self._shaped(answer, scores)
        group = Group(
            period=period,
            index=index,
            prompt=prompt,
            seed=seed,
            answer=answer,
            rewards=rewards,
            reward_parts=parts,
            advantages=self._settings.advantages(rewards),
            asked_at=asked_at,
            answered_at=answered_at,
            scored_at=time.monotonic(),
        )
        return group, nonzero_spread(scores.rewards)

    def _shaped(self, answer: Answer, scores: Scores) -> tuple[tuple[float, ...], Mapping[str, tuple[float, ...]]]:
        """Rewards as they are trained, and their parts: the functions' own, less what length costs."""
        limit, buffer = self._settings.sampling.max_tokens, self._settings.overlong_buffer
        if not buffer:
            return scores.rewards, scores.parts
        lengths = [len(response.token_ids) for response in answer.responses]
        penalties = tuple(overlong_penalty(length, limit=limit, buffer=buffer) for length in lengths)
        shaped = tuple(reward + penalty for reward, penalty in zip(scores.rewards, penalties, strict=True))
        return shaped, {**scores.parts, "overlong": penalties}

    async def _ask(self, prompt: Prompt, *, n: int, seed: int, version: int) -> Answer:
        with self._waits.awaiting("a group's samples", "the engines"):
            return await self._pool.generate(
                prompt.token_ids, n=n, seed=seed, sampling=self._settings.sampling, version=version
            )

    async def _score(self, prompt: Prompt, answer: Answer) -> Scores:
        ids = [list(response.token_ids) for response in answer.responses]
        shown = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
        with self._waits.awaiting("a group's scores", "the reward workers"):
            return await self._scorer.score(shown, [self._decode(tokens) for tokens in ids], ids, prompt.columns)


def _shortfall(period: int, selection: Selection) -> str:
    return (
        f"period {period} trains {selection.kept} groups instead of {selection.wanted}: no more of its "
        f"{selection.used} candidates have rewards that differ (algorithm.max_candidates)"
    )


async def _all(work: Any) -> None:
    """Run everything at once; the first failure cancels the rest and is raised as it was, not as a group of one."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in work:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
