"""Several ranks in real processes, over gloo: the same gradient, the same bits, checkpoints for any number of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from rondo.errors import NonFiniteGradientError, RondoError
from rondo.observe.lane import Lane
from rondo.rollout.advantage import advantages_of
from rondo.stream.loader import Loader, LoaderSettings
from rondo.stream.packing import packs, parts_of
from rondo.stream.queue import GroupQueue
from rondo.stream.scatter import decode, divide, encode, predicted_cost
from rondo.trainer.ensemble import Ensemble, follow
from rondo.trainer.lora import LoRASettings
from rondo.trainer.objective.kl_reward import RewardKL
from rondo.trainer.parallel import Alone, Joined, leave, make_mesh, whole
from rondo.trainer.trainer import Trainer
from rondo.types import Group, MicroBatch
from tests.conftest import make_group
from tests.trainers import make_trainer, micros_of, random_groups

BUDGET = 40
LORA = LoRASettings(rank=2, alpha=4.0)
REWARD_KL = RewardKL(coefficient=0.2, estimator="k1", advantages=advantages_of("rloo", scale=False))
Tensors = list[torch.Tensor]


def rounds(groups: list[Group], ranks: int) -> list[MicroBatch]:
    parts = (part for group in groups for part in parts_of(group, BUDGET))
    return [MicroBatch(parts=pack) for pack in packs(parts, BUDGET, ranks)]


# What rank 0 does with all ranks as one trainer; the other ranks follow.


def one_step(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> dict[str, Any]:
    """The gradient that was applied, and what was counted."""
    everyone.begin_period()
    for micro in rounds(random_groups(7), size):
        everyone.accumulate(micro)
    everyone.accumulate(MicroBatch(parts=(), skipped=tuple(random_groups(2, seed=1))))
    everyone.step()
    return {"gradients": list(seen), "counts": everyone.tally.read()}


def two_periods(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> dict[str, Any]:
    """The second one's: by then the old policy is another than at the start."""
    one_step(everyone, seen, size, folder)
    return one_step(everyone, seen, size, folder)


def three_steps_in_some_order(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> Tensors:
    """Every number of ranks draws its own order of arrival."""
    for step in range(3):
        groups = random_groups(9, seed=step)
        for micro in rounds(random.Random(size + step).sample(groups, len(groups)), size):
            everyone.accumulate(micro)
        everyone.step()
    return [weight.clone() for _, weight in everyone.weights()]


def leave_a_checkpoint(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> Tensors:
    """Written after two steps; the weights after a third one."""
    for step in range(3):
        if step == 2:
            everyone.write(folder / f"by-{size}")
        for micro in rounds(random_groups(4, seed=step), size):
            everyone.accumulate(micro)
        everyone.step()
    return [weight.clone() for _, weight in everyone.weights()]


def go_on_from(writer: int, everyone: Ensemble | Trainer, size: int, folder: Path) -> Tensors:
    everyone.read(folder / f"by-{writer}", steps=2)
    for micro in rounds(random_groups(4, seed=2), size):
        everyone.accumulate(micro)
    everyone.step()
    return [weight.clone() for _, weight in everyone.weights()]


def go_on_from_two(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> Tensors:
    return go_on_from(2, everyone, size, folder)


def write_and_read_apart(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> Tensors:
    """A relative path is another folder for every rank, as on machines that share no disk. A step that the
    checkpoint does not know of is undone."""
    made = Path(tempfile.mkdtemp(dir=folder if size == 1 else "."))
    apart = made if size == 1 else Path(made.name)
    for step in range(2):
        for micro in rounds(random_groups(4, seed=step), size):
            everyone.accumulate(micro)
        everyone.step()
    everyone.write(apart)
    for micro in rounds(random_groups(4, seed=9), size):
        everyone.accumulate(micro)
    everyone.step()
    everyone.read(apart, steps=2)
    for micro in rounds(random_groups(4, seed=2), size):
        everyone.accumulate(micro)
    everyone.step()
    return [weight.clone() for _, weight in everyone.weights()]


def meet_infinity(everyone: Ensemble | Trainer, seen: Tensors, size: int, folder: Path) -> None:
    bad = make_group(index=77, advantages=[float("inf"), 1.0])
    for micro in rounds([*random_groups(5), bad], size):
        everyone.accumulate(micro)
    everyone.step()


JOBS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "plain": (one_step, {"normalise": "tokens"}, 0),
    "replicated": (one_step, {"normalise": "tokens"}, 1),
    "three models": (two_periods, {"kl": 0.3, "keep_old": True, "entropy": 0.1, "algorithm": "gspo"}, 0),
    "reduced once": (one_step, {"normalise": "tokens", "reduce_once": True}, 0),
    "reduced once, replicated": (one_step, {"normalise": "tokens", "reduce_once": True}, 1),
    "offloaded": (two_periods, {"kl": 0.3, "keep_old": True, "entropy": 0.1, "algorithm": "gspo", "offload": True}, 0),
    "reward KL": (two_periods, {"algorithm": "rloo", "reward_kl": REWARD_KL, "keep_old": True}, 0),
    "cispo": (two_periods, {"algorithm": "cispo", "clip": (1.0, 0.1), "keep_old": True, "normalise": "tokens"}, 0),
    "adapters": (two_periods, {"lora": LORA, "kl": 0.3, "keep_old": True, "entropy": 0.1}, 0),
    "adapters, reduced once": (two_periods, {"lora": LORA, "kl": 0.3, "keep_old": True, "reduce_once": True}, 0),
    "narrow": (one_step, {"dtype": torch.float32, "compute": torch.bfloat16, "kl": 0.3, "keep_old": True}, 0),
    "narrow, reduced once": (one_step, {"dtype": torch.float32, "compute": torch.bfloat16, "reduce_once": True}, 0),
    "narrow adapters": (one_step, {"dtype": torch.float32, "compute": torch.bfloat16, "lora": LORA, "kl": 0.3}, 0),
    "exact adapters": (three_steps_in_some_order, {"exact": True, "dtype": torch.float32, "lora": LORA, "kl": 0.1}, 0),
    "exact": (three_steps_in_some_order, {"exact": True, "dtype": torch.float32, "kl": 0.1}, 0),
    "fast": (three_steps_in_some_order, {"dtype": torch.float32, "kl": 0.1}, 0),
    "checkpoint": (leave_a_checkpoint, {}, 0),
    "exact checkpoint": (go_on_from_two, {"exact": True}, 0),
    "resumed": (go_on_from_two, {}, 0),
    "apart": (write_and_read_apart, {}, 0),
    "exact, apart": (write_and_read_apart, {"exact": True}, 0),
    "infinite": (meet_infinity, {}, 0),  # last: it ends the ranks
}

WITH_TWO = {
    "reduced once, replicated", "offloaded", "adapters, reduced once", "narrow", "narrow, reduced once",
    "narrow adapters",
}  # fmt: skip  # not with three, to save time


def jobs_of(size: int) -> dict[str, tuple[Callable[..., Any], dict[str, Any], int]]:
    return {name: job for name, job in JOBS.items() if size < 3 or name not in WITH_TWO}


def make(options: dict[str, Any], ranks: Alone | Joined, shard: int) -> tuple[Trainer, Tensors]:
    """A trainer, and where the gradients of its last step will be found, whole."""
    sharded = ranks.size > 1 and not options.get("exact")
    mesh = make_mesh(torch.device("cpu"), ranks.size, shard) if sharded else None
    trainer = make_trainer(**options, ranks=ranks, mesh=mesh)
    seen: Tensors = []

    def remember(*_: Any) -> None:
        seen[:] = [whole(parameter.grad).clone() for _, parameter in trainer.model.named_parameters()]

    trainer.optimizer.register_step_pre_hook(remember)
    return trainer, seen


def run_rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
    ranks = Joined()
    home = folder / f"home-{size}-{rank}"
    home.mkdir()
    os.chdir(home)
    results = {}
    for name, (work, options, shard) in jobs_of(size).items():
        trainer, seen = make(options, ranks, shard)
        try:
            if rank == 0:
                ensemble = Ensemble(own=trainer, ranks=ranks, micro_tokens=BUDGET)
                results[name] = work(ensemble, seen, size, folder)
                ensemble.close()
            else:
                follow(trainer, ranks)
        except NonFiniteGradientError as error:
            results[name] = str(error)
    torch.save(results, folder / f"results-{size}-{rank}.pt")
    dist.barrier()
    leave(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What 1, 2 and 3 ranks came to."""
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for size in (2, 3):
        processes.spawn(run_rank, (size, folder), nprocs=size)
        found[size] = torch.load(folder / f"results-{size}-0.pt")
        for rank in range(1, size):  # all ranks stop alike
            assert torch.load(folder / f"results-{size}-{rank}.pt")["infinite"] == found[size]["infinite"]
    alone = {}
    for name, (work, options, shard) in JOBS.items():
        trainer, seen = make(options, Alone(), shard)
        if name != "infinite":
            alone[name] = work(trainer, seen, 1, folder)
    return found | {1: alone}


def sizes_of(job: str) -> tuple[int, ...]:
    return (2,) if job in WITH_TWO else (2, 3)


def apart(found: Tensors, expected: Tensors) -> float:
    """The largest difference of a tensor, relative to its norm."""
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


EQUAL = [
    "plain",
    "replicated",
    "three models",
    "reduced once",
    "reduced once, replicated",
    "offloaded",
    "reward KL",
    "cispo",
    "adapters",
    "adapters, reduced once",
]


@pytest.mark.parametrize("job", EQUAL)
def test_any_number_of_ranks_gives_the_same_gradient_and_counts(results, job):
    expected = results[1][job]
    for size in sizes_of(job):
        found = results[size][job]
        assert apart(found["gradients"], expected["gradients"]) < 1e-9
        for name in set(expected["counts"]) - {"micro_steps"}:
            assert found["counts"][name] == pytest.approx(expected["counts"][name], rel=1e-6), name
        assert found["counts"]["groups_trained"] == 7
        assert found["counts"]["groups_skipped"] == 2


def test_offloading_changes_no_bit(results):
    for size in (1, 2):
        one, other = (results[size][job]["gradients"] for job in ("three models", "offloaded"))
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("job", ["narrow", "narrow, reduced once", "narrow adapters"])
def test_in_bfloat16_any_number_of_ranks_sums_float32_gradients(results, job):
    """Packs differ with the number of ranks, and with them the rounding; a rank's own sum would be far off."""
    expected = results[1][job]["gradients"]
    for size in sizes_of(job):
        found = results[size][job]["gradients"]
        assert all(gradient.dtype == torch.float32 for gradient in found)
        assert apart(found, expected) < 0.05
        assert results[size][job]["counts"]["logp_gap_max"] == pytest.approx(
            results[1][job]["counts"]["logp_gap_max"], rel=0.02
        )


def test_in_exact_mode_any_order_and_any_number_of_ranks_gives_the_same_bits(results):
    for size in (2, 3):
        assert all(map(torch.equal, results[size]["exact"], results[1]["exact"]))
        assert all(map(torch.equal, results[size]["exact adapters"], results[1]["exact adapters"]))
        assert not all(map(torch.equal, results[size]["fast"], results[1]["fast"]))  # the comparison can fail


def test_a_checkpoint_of_two_ranks_goes_on_with_any_number_of_ranks(results):
    expected = results[2]["checkpoint"]
    assert all(map(torch.equal, results[2]["resumed"], expected))
    for size in (1, 3):
        assert apart(results[size]["resumed"], expected) < 1e-6
    for size in (1, 2, 3):
        assert apart(results[size]["exact checkpoint"], expected) < 1e-6


def test_ranks_that_share_no_disk_write_one_checkpoint_on_the_first_ones_machine(results):
    for size in (2, 3):
        assert all(map(torch.equal, results[size]["apart"], results[size]["checkpoint"]))
        assert apart(results[size]["exact, apart"], results[1]["apart"]) < 1e-6


def test_the_group_behind_an_infinite_gradient_is_named_whichever_rank_had_it(results):
    for size in (2, 3):
        accused = results[size]["infinite"].split("responsible: ")[1].split(". ")[0].split(", ")
        assert "prompt 77" in accused
        assert len(accused) <= 2  # it, and what shared its pack


def test_exact_sums_are_the_gradient_up_to_their_unit():
    groups = random_groups(6)
    exact, fast = make_trainer(exact=True), make_trainer()
    for micro in micros_of(groups, 60):
        exact.accumulate(micro)
        fast.accumulate(micro)
    assert apart(exact.gradients(), fast.gradients()) < 1e-6


def test_exact_sums_that_could_overflow_are_refused_and_infinity_is_named():
    large = make_group(advantages=[1e9, -1e9])
    with pytest.raises(RondoError, match=r"may exceed 2\^22.*accumulation = \"exact\""):
        make_trainer(exact=True).accumulate(micros_of([large], 60)[0])
    bad = make_group(index=77, advantages=[float("inf"), 1.0])
    with pytest.raises(NonFiniteGradientError, match="prompt 77 is not finite"):
        make_trainer(exact=True).accumulate(micros_of([bad], 60)[0])


def test_a_round_is_divided_within_the_budget_and_evenly():
    draw = random.Random(0)
    for _ in range(200):
        ranks, size = draw.randint(1, 4), draw.randint(1, 12)
        for micro in rounds(random_groups(size, seed=draw.randrange(10**6)), ranks):
            packed = divide(micro, ranks=ranks, budget=BUDGET)
            assert len(packed) == ranks
            assert sorted(id(part) for pack in packed for part in pack.parts) == sorted(map(id, micro.parts))
            assert all(sum(p.tokens for p in pack.parts) <= BUDGET or len(pack.parts) == 1 for pack in packed)
            if len(micro.parts) >= ranks:
                assert all(pack.parts for pack in packed)
    even = [make_group(index=index, responses=[[1] * 4]) for index in range(4)]
    costs = [sum(map(predicted_cost, pack.parts)) for pack in divide(rounds(even, 2)[0], ranks=2, budget=BUDGET)]
    assert costs[0] == costs[1]


def test_a_pack_arrives_as_it_was_sent_but_for_text_and_columns():
    group = dataclasses.replace(random_groups(1)[0], reward_parts={"correct": (1.0,)})
    sent = MicroBatch(parts=tuple(parts_of(group, 12)), skipped=(group,))
    expected = dataclasses.replace(group, reward_parts={})
    arrived = decode(json.loads(json.dumps(encode(sent))))
    assert arrived.skipped == (expected,)
    assert arrived.parts == tuple(parts_of(expected, 12))


@pytest.mark.parametrize("prompt_order", [True, False])
def test_the_loader_hands_out_rounds_that_hold_every_sample_once(prompt_order):
    groups = random_groups(11)
    queue = GroupQueue()
    for group in groups:
        queue.put(group)
    loader = Loader(
        queue=queue,
        settings=LoaderSettings(
            groups=11, updates=2, micro_tokens=BUDGET, synchronous=False, prompt_order=prompt_order, ranks=3
        ),
        has_gradient=lambda group: True,
        lane=Lane(),
        on_silence=lambda awaited, seconds: pytest.fail(awaited),
        silence_seconds=5,
    )
    micros = [micro for update in loader.updates(0) for micro in update if micro.parts]
    packed = [divide(micro, ranks=3, budget=BUDGET) for micro in micros]
    handed = [
        (part.group.index, number)
        for pack in itertools.chain(*packed)
        for part in pack.parts
        for number in range(part.first, part.last)
    ]
    assert sorted(handed) == [(index, number) for index in range(11) for number in range(4)]
    assert all(pack.parts for pack in packed[0])


def test_a_round_waits_for_its_ranks_no_longer_than_the_last_one_took():
    """One group is there, two ranks are: the first round starts at once, the next one waits as long as that lasted."""
    groups = random_groups(4)
    queue = GroupQueue()
    queue.put(groups[0])
    settings = LoaderSettings(groups=4, updates=1, micro_tokens=10_000, synchronous=False, prompt_order=False, ranks=2)
    loader = Loader(
        queue=queue,
        settings=settings,
        has_gradient=lambda group: True,
        lane=Lane(),
        on_silence=lambda awaited, seconds: None,
        silence_seconds=5,
    )
    update = next(loader.updates(0))
    assert len(next(update).parts) == 1
    time.sleep(2)  # the round's training, meanwhile the next group arrives, and soon the others
    queue.put(groups[1])
    threading.Timer(0.1, lambda: [queue.put(group) for group in groups[2:]]).start()
    assert len(next(update).parts) >= 2
