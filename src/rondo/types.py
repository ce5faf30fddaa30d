"""Every record that crosses a boundary. Imports nothing of ours.

Records are frozen, keyword-only and hold plain Python values: they travel between threads and processes,
and a tensor would tie them to a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the data, rendered to tokens."""

    ordinal: int  # place in the endless data stream; names the group's seed
    text: str  # the prompt as the model reads it
    token_ids: tuple[int, ...]  # [P]
    columns: Mapping[str, Any]  # the row's other columns, for the rewards
    messages: tuple[Mapping[str, Any], ...] | None = None  # a chat prompt as the data had it; None: it was a string


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The one distribution that engine and trainer share: softmax(logits / temperature)."""

    temperature: float
    top_p: float = 1.0
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool = False  # the model's own end token ends nothing: for measuring with fixed lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One sample. The stop token is part of it and is trained."""

    token_ids: tuple[int, ...]  # [R]
    logps: tuple[float, ...]  # [R], under the distribution that was sampled from
    stopped: bool  # False: cut at max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """When an answer was on its way, in seconds of the producer's clock."""

    sent: float
    engine: tuple[float | None, float | None, float | None]  # admitted, first token, finished; None: it does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an engine returned for one request: the n responses of one prompt."""

    engine: str  # the engine's address
    boot: str  # changes whenever the engine's process does
    version: tuple[int, int]  # weights held when the first response started and when the last one ended
    responses: tuple[Response, ...]  # [G], in sample order
    moments: Moments | None = field(default=None, compare=False)  # not kept with what was trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt with its G responses and their rewards; the unit that is streamed."""

    period: int
    index: int  # place among the period's prompts (with a filter: among its candidates)
    prompt: Prompt
    seed: int  # sample i was drawn with seed + i
    answer: Answer
    rewards: tuple[float, ...]  # [G], the weighted sum
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # per function, [G]
    advantages: tuple[float, ...]  # [G]
    asked_at: float  # seconds, monotonic clock of the producer
    answered_at: float
    scored_at: float
    place: int | None = None  # among the groups that passed the filter, where its order matters; None: the index

    @property
    def tokens(self) -> int:
        """Tokens of the packed row: the prompt once, then every response."""
        return len(self.prompt.token_ids) + self.response_tokens

    @property
    def response_tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.answer.responses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """Word to the loader that no more groups of this period will come: too few passed the filter."""

    period: int
    groups: int  # that did


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some responses of a group; all of them, unless the group exceeds the token budget."""

    group: Group
    first: int
    last: int  # exclusive

    @property
    def responses(self) -> tuple[Response, ...]:
        return self.group.answer.responses[self.first : self.last]

    @property
    def tokens(self) -> int:
        return len(self.group.prompt.token_ids) + sum(len(response.token_ids) for response in self.responses)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward/backward takes: groups packed into one row of tokens."""

    parts: tuple[Part, ...]
    skipped: tuple[Group, ...] = ()  # counted in every total, but provably without gradient: not run


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """An engine's word that it holds a publication."""

    engine: str
    boot: str
    version: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHashes:
    """One optimizer step in a few words: the same for the same bits, whatever the sharding."""

    gradient: str  # of the divided gradient, before clipping
    weights: str  # of the policy after the step
    norm: float  # of the gradient, before clipping


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Weights that every engine confirmed."""

    version: int
    checksum: str  # of what was published, in the published dtype
    engines: int
