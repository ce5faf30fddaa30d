"""The producer: one period's prompts to the engines, each group out when it is whole and scored.

Runs on the background loop. Consumes prompts, produces groups into the queue (waking the loader), waits for the
engine pool and the reward workers. Whatever fails in it fails the queue: the loader then raises it by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rondo.engines.pool import EnginePool
from rondo.rewards.runner import Scores
from rondo.rollout.advantage import Advantages
from rondo.rollout.background import Background
from rondo.rollout.overlong import overlong_penalty
from rondo.rollout.seeds import group_seed
from rondo.stream.queue import GroupQueue
from rondo.types import Answer, Group, Prompt, Sampling


class Scorer(Protocol):
    async def score(
        self,
        prompt: str | list[dict[str, Any]],
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, Any],
    ) -> Scores: ...


@dataclass(frozen=True, kw_only=True)
class ProducerSettings:
    run_seed: int
    group_size: int
    sampling: Sampling
    advantages: Advantages
    overlong_buffer: int = 0  # tokens before the limit in which length costs reward


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
        on_group: Callable[[Group], None],
    ) -> None:
        self._background = background
        self._pool = pool
        self._scorer = scorer
        self._queue = queue
        self._decode = decode
        self._settings = settings
        self._on_group = on_group

    def begin(self, period: int, prompts: Sequence[Prompt]) -> None:
        """Start generating; groups appear in the queue as they finish."""
        work = (self._group(period, index, prompt) for index, prompt in enumerate(prompts))
        self._background.spawn(_all(work), on_error=self._queue.fail)

    def evaluate(self, version: int, prompts: Sequence[Prompt], samples: int) -> list[float]:
        """Mean reward of every held-out prompt under this version; waits for the last."""
        rewards = [0.0] * len(prompts)

        async def score(index: int, prompt: Prompt) -> None:
            seed = group_seed(self._settings.run_seed, version, prompt.ordinal, purpose="eval")
            answer = await self._ask(prompt, n=samples, seed=seed, version=version)
            rewards[index] = sum((await self._score(prompt, answer)).rewards) / samples

        self._background.call(_all(score(index, prompt) for index, prompt in enumerate(prompts)))
        return rewards

    async def _group(self, period: int, index: int, prompt: Prompt) -> None:
        asked_at = time.monotonic()
        seed = group_seed(self._settings.run_seed, period, prompt.ordinal)
        answer = await self._ask(prompt, n=self._settings.group_size, seed=seed, version=period)
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
        self._on_group(group)
        self._queue.put(group)

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
        return await self._pool.generate(
            prompt.token_ids, n=n, seed=seed, sampling=self._settings.sampling, version=version
        )

    async def _score(self, prompt: Prompt, answer: Answer) -> Scores:
        ids = [list(response.token_ids) for response in answer.responses]
        shown = prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages]
        return await self._scorer.score(shown, [self._decode(tokens) for tokens in ids], ids, prompt.columns)


async def _all(work: Any) -> None:
    """Run everything at once; the first failure cancels the rest and is raised as it was, not as a group of one."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in work:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
