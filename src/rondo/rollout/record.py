"""A group as bytes, exactly: every number comes back as the same bits.

head      fixed width, see HEAD
prompt    int32 [P]
lengths   int32 [G]
tokens    int32 [N]        all responses, one after the other
logps     float32 or float64 [N]: float32 where that loses nothing, as with an engine that computes in it
stopped   uint8 [G]
numbers   float64 [G] each: rewards, advantages, then one row per reward part
rest      JSON: text, messages, columns, engine, boot, names of the reward parts
"""

from __future__ import annotations

import json
import struct
from array import array
from itertools import chain
from typing import Any

from rondo.types import Answer, Group, Prompt, Response

# period, index, place (-1: none), kept, wide log-probs, seed, ordinal, versions,
# asked, answered, scored, P, G, N, reward parts
HEAD = struct.Struct("=qqqBBQqqqdddIIII")


_as_json = json.JSONEncoder(default=str).encode  # made once: a group costs little else


def pack_group(group: Group, kept: bool) -> bytes:
    responses = group.answer.responses
    tokens, lengths, stopped = array("i"), array("i"), bytearray()
    logps: list[float] = []
    for response in responses:
        tokens.extend(response.token_ids)
        lengths.append(len(response.token_ids))
        logps += response.logps
        stopped.append(response.stopped)
    narrow = array("f", logps)
    wide = narrow.tolist() != logps
    prompt, answer, parts = group.prompt, group.answer, group.reward_parts
    head = HEAD.pack(
        group.period,
        group.index,
        -1 if group.place is None else group.place,
        kept,
        wide,
        group.seed,
        prompt.ordinal,
        *answer.version,
        group.asked_at,
        group.answered_at,
        group.scored_at,
        len(prompt.token_ids),
        len(responses),
        len(logps),
        len(parts),
    )
    rest = [prompt.text, prompt.messages, dict(prompt.columns), answer.engine, answer.boot, list(parts)]
    return b"".join(
        (
            head,
            array("i", prompt.token_ids).tobytes(),
            lengths.tobytes(),
            tokens.tobytes(),
            array("d", logps).tobytes() if wide else narrow.tobytes(),
            stopped,
            array("d", chain(group.rewards, group.advantages, *parts.values())).tobytes(),
            _as_json(rest).encode(),
        )
    )


def unpack_group(data: bytes) -> tuple[Group, bool]:
    (period, index, place, kept, wide, seed, ordinal, first, last, asked, answered, scored, P, G, N, parts) = (
        HEAD.unpack_from(data)
    )
    cursor = HEAD.size

    def take(kind: str, count: int) -> Any:
        nonlocal cursor
        values = array(kind)
        values.frombytes(data[cursor : cursor + count * values.itemsize])
        cursor += count * values.itemsize
        return values.tolist()

    prompt_ids, lengths, tokens = take("i", P), take("i", G), take("i", N)
    logps, stopped = take("d" if wide else "f", N), take("B", G)
    rewards, advantages = take("d", G), take("d", G)
    part_values = [tuple(take("d", G)) for _ in range(parts)]
    text, messages, columns, engine, boot, names = json.loads(data[cursor:])
    responses, start = [], 0
    for length, whole in zip(lengths, stopped, strict=True):
        end = start + length
        ids = tuple(tokens[start:end])
        responses.append(Response(token_ids=ids, logps=tuple(logps[start:end]), stopped=bool(whole)))
        start = end
    group = Group(
        period=period,
        index=index,
        prompt=Prompt(
            ordinal=ordinal,
            text=text,
            token_ids=tuple(prompt_ids),
            columns=columns,
            messages=None if messages is None else tuple(messages),
        ),
        seed=seed,
        answer=Answer(engine=engine, boot=boot, version=(first, last), responses=tuple(responses)),
        rewards=tuple(rewards),
        reward_parts=dict(zip(names, part_values, strict=True)),
        advantages=tuple(advantages),
        asked_at=asked,
        answered_at=answered,
        scored_at=scored,
        place=None if place < 0 else place,
    )
    return group, bool(kept)
