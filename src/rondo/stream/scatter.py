"""Rank 0 to the ranks: one round of packs, balanced by predicted cost, and how a pack travels.

A round is one micro-batch of the loader, divided: every rank gets a pack, an empty one where there is none. Which rank
gets what is a function of the parts and their order alone. Packs travel as JSON: what no trainer looks at (the prompt's
text, the data's columns) stays behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rondo.stream.packing import first_fit
from rondo.types import Answer, Group, MicroBatch, Part, Prompt, Response

PAIRS_PER_TOKEN = 6 * 1024  # query-key pairs that cost as much as one token's linear layers (6 x the hidden size)
LEFT_BEHIND = {"prompt", "answer", "reward_parts"}


def predicted_cost(part: Part) -> float:
    """Of forward and backward, in tokens' worth of linear layers."""
    prompt = len(part.group.prompt.token_ids)
    lengths = [len(response.token_ids) for response in part.responses]
    pairs = prompt * prompt / 2 + sum(length * (prompt + length / 2) for length in lengths)
    return part.tokens + pairs / PAIRS_PER_TOKEN


def divide(micro: MicroBatch, *, ranks: int, budget: int) -> list[MicroBatch]:
    """A pack per rank, none over the budget; the skipped groups are counted on the first."""
    bins = _by_cost(micro.parts, ranks, budget) or first_fit(micro.parts, budget, ranks)
    chosen = [tuple(part for part, rank in zip(micro.parts, bins, strict=True) if rank == r) for r in range(ranks)]
    return [MicroBatch(parts=parts, skipped=() if r else micro.skipped) for r, parts in enumerate(chosen)]


def _by_cost(parts: Sequence[Part], ranks: int, budget: int) -> list[int] | None:
    """Dearest part first, each to the rank with the least to do that has room; None when one finds no room."""
    costs, tokens, bins = [0.0] * ranks, [0] * ranks, [0] * len(parts)
    for number in sorted(range(len(parts)), key=lambda number: -predicted_cost(parts[number])):
        part = parts[number]
        open_ranks = [r for r in range(ranks) if not tokens[r] or tokens[r] + part.tokens <= budget]
        if not open_ranks:
            return None
        bins[number] = chosen = min(open_ranks, key=lambda r: costs[r])
        costs[chosen] += predicted_cost(part)
        tokens[chosen] += part.tokens
    return bins


def encode(micro: MicroBatch) -> dict[str, Any]:
    return {
        "parts": [{"group": _encode_group(part.group), "first": part.first, "last": part.last} for part in micro.parts],
        "skipped": [_encode_group(group) for group in micro.skipped],
    }


def decode(record: dict[str, Any]) -> MicroBatch:
    return MicroBatch(
        parts=tuple(
            Part(group=_decode_group(part["group"]), first=part["first"], last=part["last"]) for part in record["parts"]
        ),
        skipped=tuple(map(_decode_group, record["skipped"])),
    )


def _encode_group(group: Group) -> dict[str, Any]:
    record = {field.name: getattr(group, field.name) for field in fields(Group) if field.name not in LEFT_BEHIND}
    answer = group.answer
    record["prompt"] = {"ordinal": group.prompt.ordinal, "token_ids": group.prompt.token_ids}
    record["answer"] = {"engine": answer.engine, "boot": answer.boot, "version": answer.version}
    record["responses"] = [
        {field.name: getattr(response, field.name) for field in fields(Response)} for response in answer.responses
    ]
    return record


def _decode_group(record: dict[str, Any]) -> Group:
    rest = {name: _value(value) for name, value in record.items() if name not in ("prompt", "answer", "responses")}
    responses = tuple(Response(**{k: _value(v) for k, v in response.items()}) for response in record["responses"])
    return Group(
        prompt=Prompt(**{k: _value(v) for k, v in record["prompt"].items()}, text="", columns={}),
        answer=Answer(**{k: _value(v) for k, v in record["answer"].items()}, responses=responses),
        **rest,
    )


def _value(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value
