"""Which journalled groups a resumed run may take."""

from __future__ import annotations

import dataclasses

from rondo.rollout.journal import RecordedPeriod
from rondo.rollout.recall import still_asked_for
from rondo.rollout.seeds import group_seed
from rondo.types import Group
from tests.conftest import make_group


def settled(index: int, **changes: object) -> Group:
    group = make_group(period=2, index=index, prompt=(index, 7))
    ordinal = 10 + index
    prompt = dataclasses.replace(group.prompt, ordinal=ordinal)
    return dataclasses.replace(group, prompt=prompt, seed=group_seed(5, 2, ordinal), **changes)  # type: ignore[arg-type]


def test_only_what_would_be_asked_for_again_is_reused():
    good = [settled(0), settled(1)]
    stale = dataclasses.replace(good[0].answer, version=(1, 1))
    short = dataclasses.replace(good[0].answer, responses=good[0].answer.responses[:1])
    other = dataclasses.replace(settled(4).prompt, token_ids=(9,))
    bad = [
        dataclasses.replace(settled(2), seed=1),
        dataclasses.replace(settled(3), answer=stale),
        dataclasses.replace(settled(4), prompt=other),
        dataclasses.replace(settled(5), answer=short),
        dataclasses.replace(settled(6), prompt=dataclasses.replace(settled(6).prompt, ordinal=3)),
    ]
    recorded = RecordedPeriod(period=2, header={}, groups=(good[0], *bad), filtered=(good[1],), updates=())
    found = still_asked_for(recorded, prompts=lambda index: settled(index).prompt, run_seed=5, group_size=2)
    assert found.settled == ((good[0], True), (good[1], False))
