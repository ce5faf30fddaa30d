"""Groups into micro-batches under a token budget. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rondo.types import Group, Part


def whole(group: Group) -> Part:
    return Part(group=group, first=0, last=len(group.answer.responses))


def parts_of(group: Group, budget: int) -> list[Part]:
    """The group as it is, or split by responses (the prompt repeated in each part) where it exceeds the budget."""
    if group.tokens <= budget:
        return [whole(group)]
    prompt = len(group.prompt.token_ids)
    parts: list[Part] = []
    first, tokens = 0, prompt
    for number, response in enumerate(group.answer.responses):
        length = len(response.token_ids)
        if number > first and tokens + length > budget:
            parts.append(Part(group=group, first=first, last=number))
            first, tokens = number, prompt
        tokens += length
    return [*parts, Part(group=group, first=first, last=len(group.answer.responses))]


def packs(parts: Iterable[Part], budget: int, ranks: int = 1) -> Iterator[tuple[Part, ...]]:
    """Parts in their order, as many to a pack as fit (to a round of one pack per rank, with several ranks). A pack is
    yielded when the next part no longer fits, so it is a function of order and lengths alone, however slowly `parts`
    arrive."""
    pack: list[Part] = []
    tokens = [0] * ranks
    for part in parts:
        if (rank := _room(tokens, part, budget)) is None:
            yield tuple(pack)
            pack, tokens, rank = [], [0] * ranks, 0
        pack.append(part)
        tokens[rank] += part.tokens
    if pack:
        yield tuple(pack)


def first_fit(parts: Sequence[Part], budget: int, ranks: int) -> list[int]:
    """The rank of each part of a pack that `packs` made, within the budget of every rank."""
    tokens, chosen = [0] * ranks, []
    for part in parts:
        rank = _room(tokens, part, budget)
        assert rank is not None, "more parts than a round of packs holds"
        tokens[rank] += part.tokens
        chosen.append(rank)
    return chosen


def _room(tokens: Sequence[int], part: Part, budget: int) -> int | None:
    """The first rank with room; one part alone may exceed the budget."""
    return next((rank for rank, held in enumerate(tokens) if not held or held + part.tokens <= budget), None)
