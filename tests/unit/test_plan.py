"""`rondo plan`: the simulated period against hand-made ones, against the code it stands for, and against itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from rondo.config import parse_config
from rondo.engines.embedded import EmbeddedEngine, Request
from rondo.engines.pool import EnginePool
from rondo.errors import UserError
from rondo.plan.calibrate import Calibration, calibrate, engine_cost, fit, micro_seconds, trainer_cost
from rondo.plan.decoder import Decoder
from rondo.plan.records import Costs, EngineCost, Setting, Task, TrainerCost
from rondo.plan.search import plan, predict
from rondo.plan.show import caveats, sentence
from rondo.plan.simulate import generate, has_room, simulate
from rondo.plan.training import fitting, pieces, train
from rondo.plan.work import Lengths, SeenGroup
from rondo.rollout.journal import Journal, RecordedMicro, RecordedPeriod, RecordedUpdate
from rondo.stream.packing import packs, parts_of
from rondo.types import Group, MicroBatch, Part, Sampling
from tests.conftest import make_group
from tests.models import tiny_model
from tests.unit.test_pool import SAMPLING, FakeEngine

ENGINE = EngineCost(step=2e-3, row=1e-4, key=1e-7, prefill=1e-3, prompt_token=1e-5, request=0.05)
COSTS = Costs(
    engine=ENGINE, trainer=TrainerCost(micro=0.01, token=3e-4), step=0.03, publish=0.1, reward=0.004, rest=0.01
)
SETTING = Setting(
    engines=1, ranks=1, slots=16, prompts=24, group_size=4, max_new_tokens=60, micro_tokens=512
)  # fmt: skip


def some_tasks(count: int = 24, size: int = 4, seed: int = 0) -> list[Task]:
    chance = random.Random(seed)
    return [
        Task(chance.randint(5, 40), tuple(chance.randint(1, 60) for _ in range(size))) for _ in range(count)
    ]  # fmt: skip


def group_of(task: Task, index: int) -> Group:
    return make_group(index=index, prompt=[1] * task.prompt, responses=[[2] * length for length in task.lengths])


def recorded(tasks: list[Task], setting: Setting, costs: Costs, period: int = 0) -> tuple[RecordedPeriod, float]:
    """A period that went exactly as simulated, and how long its training took."""
    generation = generate(tasks, setting, costs)
    groups = [
        dataclasses.replace(
            group_of(tasks[arrival.index], arrival.index),
            period=period,
            asked_at=100.0,
            answered_at=100.0 + arrival.answered,
            scored_at=100.0 + arrival.scored,
        )
        for arrival in generation.arrivals
    ]
    micros = tuple(RecordedMicro(parts=((g.index, 0, len(g.rewards)),), skipped=()) for g in groups)
    seconds = sum(costs.trainer.micro + costs.trainer.token * group.tokens for group in groups)
    update = RecordedUpdate(micros=micros, hashes=None)
    whole = RecordedPeriod(period=period, header={}, groups=tuple(groups), filtered=(), updates=(update,), end={})
    return whole, seconds


def test_samples_end_at_the_same_decode_steps_as_in_the_embedded_engine():
    engine = EmbeddedEngine(tiny_model(), slots=6)
    sampling = Sampling(temperature=1.0, max_tokens=24, stop_token_ids=(0, 3, 4))
    requests = [Request(prompt=(5,) * (3 + n), n=4, seed=100 * n, sampling=sampling) for n in range(8)]
    tickets = {engine.submit(request): number for number, request in enumerate(requests)}
    ended: dict[int, int] = {}
    lengths: dict[int, list[int]] = {}
    step = 0
    while not engine.idle:
        for result in engine.step():
            ended[tickets[result.ticket]] = step
            lengths[tickets[result.ticket]] = [len(sample.token_ids) for sample in result.samples]
        step += 1
    decoder = Decoder(6)
    for number, request in enumerate(requests):
        decoder.submit(number, len(request.prompt), lengths[number])
    seen = {}
    while decoder.admit() and decoder.running:
        for number in decoder.run(decoder.next_end()):
            seen[number] = decoder.step
    assert [number for number, _ in sorted(seen.items(), key=lambda item: item[1])] == list(
        dict(sorted(ended.items(), key=lambda item: item[1]))
    )
    # an engine's step admits and decodes: what ends in the k-th has been through k or k + 1 decodes
    assert all(abs(seen[number] - ended[number]) <= 1 for number in ended)


@pytest.mark.parametrize(("slots", "n"), [(4, 2), (8, 3), (32, 8), (32, 4), (16, 1), (4, 8)])
def test_as_many_requests_are_in_flight_as_the_pool_lets(slots, n):
    async def asked() -> int:
        pool = EnginePool(max_retries=0, on_retry=lambda error: None)
        engine = FakeEngine(slots=slots, held=True)
        await pool.add(engine)
        waiting = [
            asyncio.create_task(pool.generate((1,), n=n, seed=0, sampling=SAMPLING, version=0)) for _ in range(60)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        count = len(engine.asked)
        engine.release()
        await asyncio.gather(*waiting)
        return count

    in_flight = 0
    while has_room(slots=slots, in_flight=in_flight, n=n):
        in_flight += n
    assert asyncio.run(asked()) == in_flight // n


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("budget", [40, 100, 400])
def test_groups_are_split_and_packed_as_the_loader_does(budget, ranks):
    tasks = some_tasks(80, seed=budget)
    ours = [piece for task in tasks for piece in pieces(task, budget)]
    theirs = [part for index, task in enumerate(tasks) for part in parts_of(group_of(task, index), budget)]
    assert [piece.tokens for piece in ours] == [part.tokens for part in theirs]
    for pack in packs(theirs, budget, ranks):
        count = fitting(ours, budget, ranks)
        assert count == len(pack)
        ours = ours[count:]
    assert not ours


def test_a_pack_may_be_full_to_the_last_token():
    whole = pieces(Task(10, (10,)), 100)
    assert fitting(whole * 6, 100, 1) == 5
    assert fitting(whole * 11, 100, 2) == 10
    assert fitting(pieces(Task(200, (1,)), 100) * 3, 100, 2) == 2  # one alone may exceed the budget


def test_one_group_takes_what_its_parts_take():
    task = Task(10, (5, 3))
    setting = dataclasses.replace(SETTING, prompts=1, group_size=2)
    prefill = 0.05 + 1e-3 + 10 * 1e-5
    # two rows for two steps, which ends the shorter one; then one row for two more. Keys: a prompt and what was drawn.
    steps = 4 * 2e-3 + (2 + 2 + 1 + 1) * 1e-4 + (22 + 24 + 13 + 14) * 1e-7
    outcome = simulate([task], setting, COSTS)
    assert outcome.states["first group"] == pytest.approx(prefill + steps)
    assert outcome.states["rewards"] == pytest.approx(0.004)
    assert outcome.states["training"] == pytest.approx(0.01 + 18 * 3e-4)
    assert outcome.seconds == pytest.approx(prefill + steps + 0.004 + 0.01 + 18 * 3e-4 + 0.03 + 0.1 + 0.01)


def test_the_synchronous_period_is_the_sum_of_its_phases():
    tasks = some_tasks()
    setting = dataclasses.replace(SETTING, schedule="synchronous")
    generation = generate(tasks, setting, COSTS)
    outcome = simulate(tasks, setting, COSTS)
    training = train(tasks, generation, setting, COSTS).training
    assert outcome.seconds == pytest.approx(generation.arrivals[-1].scored + training + 0.03 + 0.1 + 0.01)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_periodic_period_lies_between_its_longer_half_and_the_sum_of_both(order, ranks):
    tasks = some_tasks()
    periodic = dataclasses.replace(SETTING, prompt_order=order, ranks=ranks)
    waiting = dataclasses.replace(periodic, schedule="synchronous")
    generation = generate(tasks, periodic, COSTS)
    outcome = simulate(tasks, periodic, COSTS)
    assert outcome.seconds <= simulate(tasks, waiting, COSTS).seconds * 1.1  # smaller packs cost a little more
    assert outcome.seconds >= max(generation.ended, outcome.states["training"]) + COSTS.publish


def test_every_group_is_trained_once_and_the_states_are_the_whole_period():
    for seed in range(20):
        chance = random.Random(seed)
        setting = dataclasses.replace(
            SETTING,
            engines=chance.randint(1, 5),
            ranks=chance.randint(1, 4),
            slots=chance.choice([2, 4, 16, 64]),
            updates=chance.choice([1, 2]),
            reward_workers=chance.choice([1, 3]),
        )
        tasks = some_tasks(seed=seed)
        generation = generate(tasks, setting, COSTS)
        assert sorted(arrival.index for arrival in generation.arrivals) == list(range(24))
        assert all(a.answered <= b.answered for a, b in pairwise(generation.arrivals))
        outcome = simulate(tasks, setting, COSTS)
        assert all(seconds >= 0 for seconds in outcome.states.values())
        assert outcome.seconds == pytest.approx(sum(outcome.states.values()))
        assert outcome.engine_share <= 1
        assert outcome.samples == 96


def test_groups_without_gradient_are_generated_but_not_trained():
    tasks = [dataclasses.replace(task, trained=index % 2 == 0) for index, task in enumerate(some_tasks())]
    assert (
        simulate(tasks, SETTING, COSTS).states["training"] < simulate(some_tasks(), SETTING, COSTS).states["training"]
    )
    assert simulate(tasks, SETTING, COSTS).samples == 48


def test_costs_are_found_again_in_a_period_that_they_made():
    periods = [recorded(some_tasks(seed=seed), SETTING, COSTS) for seed in range(4)]
    found = engine_cost([period for period, _ in periods], SETTING.slots)
    for rows in (1, 4, 16, 32):
        assert found.tokens_per_second(rows, 40) == pytest.approx(ENGINE.tokens_per_second(rows, 40), rel=0.02)
    assert found.request == pytest.approx(ENGINE.request, abs=0.01)
    trained = trainer_cost([period for period, _ in periods], [seconds for _, seconds in periods])
    assert trained.micro + 300 * trained.token == pytest.approx(0.01 + 300 * 3e-4, rel=0.02)


def test_periods_on_a_busy_machine_do_not_bend_the_costs():
    periods = []
    for seed, pace in enumerate((1.0, 2.5, 1.0, 1.1, 0.9)):
        whole, _ = recorded(some_tasks(seed=seed), SETTING, COSTS)
        slower = (dataclasses.replace(g, answered_at=100 + (g.answered_at - 100) * pace) for g in whole.groups)
        periods.append(dataclasses.replace(whole, groups=tuple(slower)))
    found = engine_cost(periods, SETTING.slots)
    for rows in (1, 4, 16, 32):
        assert found.tokens_per_second(rows, 40) == pytest.approx(ENGINE.tokens_per_second(rows, 40), rel=0.05)


def test_micro_batches_are_told_apart_where_spans_have_each(tmp_path):
    whole, seconds = recorded(some_tasks(), SETTING, COSTS)
    lane = [["training", 1.0, 1.01 + 3e-4 * group.tokens, [group.index], group.tokens] for group in whole.groups]
    line = {"period": 0, "lanes": {"trainer": [["stepping", 0, 1], *lane, ["training", 2.0, 2.5, [], 0]]}}
    (tmp_path / "spans.jsonl").write_text(json.dumps(line) + "\n")
    found = trainer_cost([whole], [seconds], micro_seconds(tmp_path))
    assert (found.micro, found.token) == pytest.approx((0.01, 3e-4), rel=1e-3)


def test_costs_of_two_engines_are_found_each_by_its_own_groups():
    setting = dataclasses.replace(SETTING, engines=2)
    tasks = some_tasks()
    period, _ = recorded(tasks, setting, COSTS)
    # which engine answered follows from the dispatch: groups alternate as long as both are equally free
    shares: dict[int, str] = {}
    decoders = _dispatched(tasks, setting)
    for name, indexes in decoders.items():
        shares |= dict.fromkeys(indexes, name)
    groups = tuple(
        dataclasses.replace(group, answer=dataclasses.replace(group.answer, engine=shares[group.index]))
        for group in period.groups
    )
    found = engine_cost([dataclasses.replace(period, groups=groups)], setting.slots)
    assert found.tokens_per_second(16, 40) == pytest.approx(ENGINE.tokens_per_second(16, 40), rel=0.05)


def _dispatched(tasks: list[Task], setting: Setting) -> dict[str, list[int]]:
    from rondo.plan.simulate import _Generation

    generation = _Generation(tasks, setting, ENGINE)
    holders: dict[int, int] = {}

    class Watched(dict[int, int]):
        def __setitem__(self, key: int, value: int) -> None:
            holders[key] = value
            super().__setitem__(key, value)

    generation._holder = Watched()
    generation.run()
    return {name: [t for t, n in holders.items() if f"engine-{n}" == name] for name in ("engine-0", "engine-1")}


def test_a_fit_leaves_out_what_would_cost_less_than_nothing():
    import numpy as np

    table = np.array([[1.0, 5.0], [2.0, 4.0], [3.0, 3.0]])
    assert fit(table, np.array([1.0, 2.0, 3.0])) == pytest.approx([1.0, 0.0])
    with_negative = np.array([[1.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
    assert min(fit(with_negative, np.array([0.5, 1.6, 3.9]))) == 0.0  # the best line has a negative intercept
    assert fit(table, 0.5 * table[:, 0] + 0.25 * table[:, 1]) == pytest.approx([0.5, 0.25])


def seen_lengths(limit: int = 60) -> Lengths:
    chance = random.Random(1)

    def one() -> SeenGroup:
        drawn = [1 + int(chance.expovariate(1 / 40)) for _ in range(4)]
        return SeenGroup(12, tuple(min(n, limit) for n in drawn), tuple(n < limit for n in drawn))

    return Lengths(groups=tuple(one() for _ in range(400)), limit=limit)


def test_a_lower_limit_cuts_and_a_higher_one_lets_responses_go_on_at_the_rate_seen():
    lengths = seen_lengths()
    shorter = lengths.draw(dataclasses.replace(SETTING, prompts=400, max_new_tokens=20), seed=0)
    assert max(n for task in shorter for n in task.lengths) == 20
    longer = lengths.draw(dataclasses.replace(SETTING, prompts=2000, max_new_tokens=10_000), seed=0)
    drawn = [n for task in longer for n in task.lengths]
    assert sum(drawn) / len(drawn) == pytest.approx(40, rel=0.1)  # the mean of the distribution that was cut at 60
    assert lengths.draw(SETTING, seed=3) == lengths.draw(SETTING, seed=3)


def test_larger_groups_are_drawn_from_the_same_prompt():
    lengths = Lengths(groups=(SeenGroup(1, (3, 3), (True, True)), SeenGroup(2, (9, 9), (True, True))), limit=60)
    for task in lengths.draw(dataclasses.replace(SETTING, group_size=5), seed=0):
        assert task.lengths == ((3,) * 5 if task.prompt == 1 else (9,) * 5)


def test_candidates_are_drawn_until_enough_pass_the_filter():
    groups = tuple(SeenGroup(1, (3,), (True,), kept=kept) for kept in (True, False, False, False))
    tasks = Lengths(groups=groups, limit=9).draw(dataclasses.replace(SETTING, prompts=50, group_size=1), seed=0)
    assert sum(task.trained for task in tasks) == 50
    assert 120 < len(tasks) < 320


def known(costs: Costs = COSTS, setting: Setting = SETTING) -> Calibration:
    return Calibration(costs=costs, lengths=seen_lengths(), setting=setting, seconds=2.0, periods=3)


def test_every_split_is_ranked_and_what_bounds_it_is_named():
    found = plan(known(), devices=6, groups=[4], prompts=[24])
    assert sorted(split.setting.engines for split in found.splits) == [1, 2, 3, 4, 5]
    assert all(split.setting.devices == 6 for split in found.splits)
    seconds = [split.outcome.seconds for split in found.splits]
    assert seconds == sorted(seconds)
    by_engines = {split.setting.engines: split for split in found.splits}
    assert by_engines[5].bound == "training"
    slow = Costs(**{**COSTS.__dict__, "engine": EngineCost(step=0.05, row=1e-4)})
    assert {split.bound for split in plan(known(slow), devices=3, groups=[4], prompts=[24]).splits} <= {
        "generation",
        "tail",
        "first group",
    }
    assert "rank" in sentence(found)


def test_other_sizes_are_ranked_by_responses_per_second():
    found = plan(known(), devices=3, groups=[2, 8], prompts=[8, 32])
    assert sorted((size.setting.group_size, size.setting.prompts) for size in found.sizes) == [
        (2, 8), (2, 32), (8, 8), (8, 32),
    ]  # fmt: skip
    speeds = [size.samples_per_second for size in found.sizes]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize(("name", "seconds"), [("publish", 9.0), ("step", 60.0), ("reward", 2.0)])
def test_what_takes_longest_bounds_the_period(name, seconds):
    costs = dataclasses.replace(COSTS, **{name: seconds})
    bounds = {"publish": "publishing", "step": "stepping", "reward": "rewards"}
    assert predict(known(costs), SETTING).bound == bounds[name]


def test_a_long_tail_is_named_as_such():
    tasks = [SeenGroup(5, (10,) * 4, (True,) * 4)] * 60 + [SeenGroup(5, (10, 10, 10, 4000), (True,) * 4)]
    lengths = Lengths(groups=tuple(tasks), limit=4000)
    setting = dataclasses.replace(SETTING, prompts=60, slots=64, max_new_tokens=4000)
    assert predict(dataclasses.replace(known(setting=setting), lengths=lengths), setting).bound == "tail"


def test_engines_of_several_devices_are_counted_with_all_of_them():
    wide = dataclasses.replace(SETTING, engine_devices=4)
    found = plan(known(setting=wide), devices=10, groups=[4], prompts=[24])
    assert sorted((split.setting.engines, split.setting.ranks) for split in found.splits) == [(1, 6), (2, 2)]
    with pytest.raises(UserError, match="leaves none for the trainer"):
        plan(known(setting=wide), devices=4)


def test_many_devices_are_searched_without_trying_every_split():
    found = plan(known(), devices=100, groups=[4], prompts=[24])
    assert len(found.splits) < 60
    assert found.splits[0].outcome.seconds <= min(split.outcome.seconds for split in found.splits)
    assert any("was not recorded" in text for text in caveats(found))


def a_run(folder: Path) -> None:
    """A run's folder as `rondo train` leaves it, of three periods that went as simulated."""
    setting = dataclasses.replace(SETTING, micro_tokens=256)
    tree = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "rewards": {"functions": ["r:r"]},
        "rollout": {"prompts_per_period": 24, "group_size": 4, "max_new_tokens": 60},
        "trainer": {"micro_tokens": 256},
        "engines": {"slots": 16},
    }
    parse_config(tree).write(folder / "config.json")
    journal = Journal(folder=folder, header={})
    lines = []
    for number in range(3):
        tasks = some_tasks(seed=number)
        period, _ = recorded(tasks, setting, COSTS, number)
        for group in period.groups:
            journal.group(group, True)
            journal.micro(MicroBatch(parts=(Part(group=group, first=0, last=4),)))
        journal.step(None)
        journal.finish({})
        states = simulate(tasks, setting, COSTS).states
        seconds = {
            "training": states["training"],
            "stepping": 0.03,
            "publishing": 0.1,
            "preparing": 0.01,
            "waiting for groups": sum(states[name] for name in ("first group", "generation", "tail", "rewards")),
        }
        lines.append({"period": number, "trainer_seconds": seconds})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_recorded_run_is_read_and_its_own_period_foreseen(tmp_path):
    a_run(tmp_path)
    found = calibrate(tmp_path)
    assert found.setting == dataclasses.replace(SETTING, micro_tokens=256)
    assert found.costs.publish == pytest.approx(0.1)
    assert found.costs.reward == pytest.approx(0.004, rel=0.2)
    assert predict(found, found.setting).outcome.seconds == pytest.approx(found.seconds, rel=0.1)


def test_the_command_prints_a_table_and_a_sentence_without_torch(tmp_path):
    a_run(tmp_path)
    program = "import sys, rondo.cli; sys.argv = ['rondo', *sys.argv[1:]]\ntry: rondo.cli.main()\n"
    program += "finally: sys.stderr.write('torch' * ('torch' in sys.modules))"
    command = [sys.executable, "-c", program, "plan", str(tmp_path), "--devices", "4", "--prompts", "24"]
    command += ["--group-sizes", "4"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bound by" in shown.stdout
    assert "4 devices do the recorded work fastest as" in shown.stdout.replace("\n", " ")
    assert "torch" not in shown.stderr
    machine = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert len(machine["splits"]) == 3
    assert {"predicted_seconds", "bound", "states"} <= machine["splits"][0].keys()


def test_a_folder_without_a_run_gets_a_sentence(tmp_path):
    with pytest.raises(UserError, match="is no run"):
        calibrate(tmp_path)
    a_run(tmp_path)
    for path in (tmp_path / "journal").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"journal\.enabled"):
        calibrate(tmp_path)
