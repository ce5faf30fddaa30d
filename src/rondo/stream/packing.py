"""Groups into micro-batches under a token budget. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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


def packs(parts: Iterable[Part], budget: int) -> Iterator[tuple[Part, ...]]:
    """Parts in their order, as many to a pack as fit. A pack is yielded when the next part no longer fits, so it is
    a function of order and lengths alone, however slowly `parts` arrive."""
    pack: list[Part] = []
    tokens = 0
    for part in parts:
        if pack and tokens + part.tokens > budget:
            yield tuple(pack)
            pack, tokens = [], 0
        pack.append(part)
        tokens += part.tokens
    if pack:
        yield tuple(pack)
