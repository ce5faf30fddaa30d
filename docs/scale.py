"""Carries `rondo plan`'s simulator to 4096 devices: draws `scale.svg`, `scale-time.svg`; prints the tables of scale.md.

python docs/scale.py

What is measured and what is assumed is said where it is used, and in scale.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rondo.plan.records import Costs, EngineCost, Outcome, Setting, Task, TrainerCost
from rondo.plan.search import bound_of
from rondo.plan.simulate import finish, generate, simulate

HERE = Path(__file__).parent
DEVICES = (16, 64, 256, 1024, 4096)
PER_DEVICE = (1, 2, 4, 8, 16, 32)
SECONDS = (50, 100, 200, 500, 1000, 2000)
GAINS = (1, 1.2, 1.4, 1.6, 1.8)
PEAK, MEMORY = 989e12, 4.8e12  # an H200: bfloat16 FLOP/s and bytes/s, as its data sheet says
TRAIN = 0.45 * PEAK  # measured with the 1.5B (docs/performance.md), assumed for the others
DECODE = 0.6 * MEMORY  # assumed: what decoding reaches of the memory's speed
PREFILL = 0.5 * PEAK  # assumed
HOST_STEP, HOST_ROW = 3e-3, 22e-6  # chosen so that the 1.5B decodes 24k tokens/s with 256 sequences, as measured
SHARDED_LINK, HOSTS_LINK, PUBLISH = (
    400e9,
    50e9,
    10e9,
)  # assumed bytes/s: in a host, per device between hosts, publication
EXPOSED = 0.1  # assumed: the part of sharding's traffic that does not hide behind arithmetic
PROMPT, GROUP, MICRO = 512, 16, 16384


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    parameters: float
    layers: int
    hidden: int
    key_bytes: int  # keys and values of one token, all layers, bfloat16
    engine_devices: int
    slots: int
    mean: float  # response tokens
    limit: int


MODELS = (
    Model(name="1.5B", parameters=1.54e9, layers=28, hidden=1536, key_bytes=28_672, engine_devices=1, slots=256,
          mean=1500, limit=4096),
    Model(name="8B", parameters=8.2e9, layers=36, hidden=4096, key_bytes=147_456, engine_devices=1, slots=128,
          mean=3000, limit=16384),
    Model(name="32B", parameters=32.8e9, layers=64, hidden=5120, key_bytes=262_144, engine_devices=4, slots=128,
          mean=4000, limit=16384),
)  # fmt: skip


def costs_of(model: Model, ranks: int) -> Costs:
    wide = model.engine_devices
    return Costs(
        engine=EngineCost(
            step=HOST_STEP + 2 * model.parameters / DECODE / wide,
            row=HOST_ROW + 2 * model.parameters / PREFILL / wide,
            key=model.key_bytes / DECODE / wide,
            prompt_token=2 * model.parameters / PREFILL / wide,
            request=0.01,
        ),
        trainer=TrainerCost(
            micro=5e-3,
            token=6 * model.parameters / TRAIN,
            pair=12 * model.layers * model.hidden / TRAIN,
            round=EXPOSED * 8 * model.parameters / SHARDED_LINK,
        ),
        # a step's time does not fall with ranks: every shard of 8 sums its eighth between hosts, then steps
        step=(0.05 + 8 * model.parameters / 8 / HOSTS_LINK) * ranks,
        publish=0.3 + 2 * model.parameters / PUBLISH,
        reward=0.005,
    )


def tasks_of(model: Model, prompts: int, seed: int = 0) -> list[Task]:
    """Lengths with a long tail: log-normal with a sigma of 0.8 around a prompt's own level, cut at the limit."""
    chance = random.Random(seed)
    middle = math.log(model.mean) - 0.8**2 / 2 - 0.4**2 / 2
    tasks = []
    for _ in range(prompts):
        level = chance.gauss(middle, 0.4)
        drawn = (int(math.exp(chance.gauss(level, 0.8))) for _ in range(GROUP))
        tasks.append(Task(PROMPT, tuple(max(1, min(length, model.limit)) for length in drawn)))
    return tasks


@dataclass(frozen=True, kw_only=True)
class Point:
    devices: int
    engines: int
    ranks: int
    periodic: Outcome
    apart: float  # synchronous, on its own best split
    together: float  # synchronous, all devices for each phase, with no cost for changing over
    bound: str
    longest: float  # alone in an engine: no period is shorter

    @property
    def gain(self) -> float:
        return self.apart / self.periodic.seconds


def setting_of(model: Model, engines: int, ranks: int, prompts: int) -> Setting:
    return Setting(
        engines=engines, ranks=ranks, slots=model.slots, prompts=prompts, group_size=GROUP, max_new_tokens=model.limit,
        micro_tokens=MICRO, reward_workers=64, engine_devices=model.engine_devices,
    )  # fmt: skip


def point(model: Model, devices: int, prompts: int) -> Point:
    tasks, wide = tasks_of(model, prompts), model.engine_devices
    best: tuple[float, Outcome, Setting] | None = None
    apart = math.inf
    tried: set[int] = set()
    for sixteenths in (6, 8, 10, 11, 12, 13):
        engines = max(1, devices * sixteenths // 16 // wide)
        ranks = devices - engines * wide
        if engines in tried or ranks < 1:
            continue
        tried.add(engines)
        setting = setting_of(model, engines, ranks, prompts)
        costs = costs_of(model, ranks)
        generated = generate(tasks, setting, costs)
        outcome = finish(tasks, generated, setting, costs)
        waiting = finish(tasks, generated, replace(setting, schedule="synchronous"), costs).seconds
        apart = min(apart, waiting)
        if best is None or outcome.seconds < best[0]:
            best = (outcome.seconds, outcome, setting)
    assert best is not None
    _, outcome, setting = best
    costs = costs_of(model, setting.ranks)
    both = replace(setting_of(model, devices // wide, devices, prompts), schedule="synchronous")
    alone = costs.engine.step + costs.engine.row + costs.engine.key * (PROMPT + model.limit / 2)
    return Point(
        devices=devices,
        engines=setting.engines,
        ranks=setting.ranks,
        periodic=outcome,
        apart=apart,
        together=simulate(tasks, both, costs_of(model, devices)).seconds,
        bound=bound_of([tasks], setting, costs),
        longest=alone * max(max(task.lengths) for task in tasks),
    )


def seconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(points: Sequence[Point]) -> str:
    rows = [
        "| devices | engines, ranks | periodic | synchronous, split | synchronous, all devices for each | bound by | "
        "engines, trainer busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in points:
        busy = f"{p.periodic.engine_share:.0%}, {p.periodic.trainer_share:.0%}"
        rows.append(
            f"| {p.devices} | {p.engines}, {p.ranks} | {seconds(p.periodic.seconds)} s | {seconds(p.apart)} s | "
            f"{seconds(p.together)} s | {p.bound} | {busy} |"
        )
    return "\n".join(rows)


STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #768390; }
  .title { font-weight: 600; }
  .grid { stroke: #768390; stroke-opacity: 0.25; }
  .a { stroke: #2f81f7; fill: #2f81f7; } .b { stroke: #d4772b; fill: #d4772b; } .c { stroke: #3d9a50; fill: #3d9a50; }
  .d { stroke: #a371f7; fill: #a371f7; }
  path { fill: none !important; stroke-width: 2.5; } .dashed { stroke-dasharray: 5 4; }
"""
WIDTH, HEIGHT, LEFT, TOP = 360, 250, 54, 40
Line = tuple[str, str, list[tuple[float, float]]]  # name, class, points


def chart(x0: int, title: str, unit: str, lines: Sequence[Line], columns: Sequence[int], ticks: Sequence[float]) -> str:
    """Logarithmic in both directions; names stand at the lines' right ends, pushed apart where they would meet."""
    low, high = ticks[0] * 0.95, ticks[-1] * 1.05

    def x(value: float) -> float:
        return x0 + LEFT + math.log(value / columns[0]) / math.log(columns[-1] / columns[0]) * (WIDTH - LEFT - 106)

    def y(value: float) -> float:
        return TOP + (1 - math.log(value / low) / math.log(high / low)) * (HEIGHT - TOP - 30)

    parts = [f'<text class="title" x="{x0 + 8}" y="18">{title}</text>']
    for tick in ticks:
        ends = f'x1="{x(columns[0])}" x2="{x(columns[-1])}"'
        parts.append(f'<line class="grid" {ends} y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{x(columns[0]) - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}{unit}</text>')
    parts += [f'<text x="{x(d):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{d}</text>' for d in columns]
    under = -math.inf
    for name, kind, points in sorted(lines, key=lambda line: -line[2][-1][1]):
        path = "M" + " L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(f'<path class="{kind}" d="{path}"/>')
        parts += [f'<circle class="{kind}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5"/>' for a, b in points]
        under = max(y(points[-1][1]) + 4, under + 14)
        parts.append(f'<text x="{x(columns[-1]) + 8:.1f}" y="{under:.1f}">{name}</text>')
    return "\n".join(parts)


def draw(name: str, label: str, charts: Sequence[str]) -> None:
    width = WIDTH * len(charts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{label}">'
    (HERE / name).write_text("\n".join([head, f"<style>{STYLE}</style>", *charts, "</svg>"]) + "\n")


def times(points: Sequence[Point]) -> list[Line]:
    return [
        ("periodic", "a", [(p.devices, p.periodic.seconds) for p in points]),
        ("sync, split", "b", [(p.devices, p.apart) for p in points]),
        ("sync, all", "c", [(p.devices, p.together) for p in points]),
        ("longest", "d dashed", [(p.devices, p.longest) for p in points]),
    ]


def main() -> None:
    same, growing, wider = {}, {}, {}
    for model in MODELS:
        wider[model.name] = [point(model, 64, 64 * count) for count in PER_DEVICE]
        found = ", ".join(f"{n}: {p.gain:.2f}x" for n, p in zip(PER_DEVICE, wider[model.name], strict=True))
        print(f"### {model.name}\n\nGain on 64 devices by prompts per device: {found}\n", flush=True)
    for model in MODELS:
        same[model.name] = [point(model, devices, 512) for devices in DEVICES]
        print(f"### {model.name}\n\n512 prompts x 16:\n\n{table(same[model.name])}\n", flush=True)
        growing[model.name] = [point(model, devices, 8 * devices) for devices in DEVICES]
        print(f"Eight prompts x 16 per device:\n\n{table(growing[model.name])}\n", flush=True)
    kinds = dict(zip(same, ("a", "b", "c"), strict=True))
    draw(
        "scale-time.svg",
        "Seconds of a period against devices, 8B, for a fixed and for a growing batch",
        [
            chart(0, "8B, 512 prompts per period", " s", times(same["8B"]), DEVICES, SECONDS),
            chart(WIDTH, "8B, eight prompts per device", " s", times(growing["8B"]), DEVICES, SECONDS),
        ],
    )
    by_devices = [(name, kinds[name], [(p.devices, p.gain) for p in points]) for name, points in same.items()]
    by_prompts = [
        (name, kinds[name], list(zip(PER_DEVICE, (p.gain for p in points), strict=True)))
        for name, points in wider.items()
    ]
    draw(
        "scale.svg",
        "Gain of periodic over synchronous on a split: by devices, and by prompts per device",
        [
            chart(0, "gain, by devices: 512 prompts in all", "x", by_devices, DEVICES, GAINS),
            chart(WIDTH, "gain, by prompts per device: 64 devices", "x", by_prompts, PER_DEVICE, GAINS),
        ],
    )


if __name__ == "__main__":
    main()
