"""A plan as people read it, a table and a sentence, and as programs do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rondo.plan.records import Bound, Setting
from rondo.plan.search import Plan, Prediction

ROWS = 12
WHAT_HELPS: dict[Bound, str] = {
    "training": "Training bounds it: faster or more ranks would shorten it most",
    "generation": "Generation bounds it: faster or more engines would shorten it most",
    "tail": "The last long responses bound it: more devices do not help; a lower max_new_tokens does, and more prompts "
    "per period make the tail count less",
    "first group": "The wait for the first group bounds it: smaller groups help, and more prompts per period make it "
    "count less",
    "rewards": "Rewards bound it: raise rewards.workers, or make the functions faster",
    "stepping": "The optimizer's step bounds it: more prompts per period spread it over more work",
    "publishing": "Publication bounds it: more prompts per period spread it over more work",
    "rest": "What bounds it is not simulated: see trainer_seconds in metrics.jsonl",
}


def sentence(plan: Plan) -> str:
    best = plan.splits[0]
    recorded = plan.calibration
    return (
        f"{plan.devices} devices do the recorded work fastest as {_split(best.setting)}: a period takes "
        f"{_seconds(best.outcome.seconds)}, against {_seconds(recorded.seconds)} as recorded with "
        f"{_split(recorded.setting)}. {WHAT_HELPS[best.bound]}."
    )


def caveats(plan: Plan) -> list[str]:
    """What the recorded run could not tell."""
    recorded, said = plan.calibration.setting, []
    now, seen = plan.now.outcome.seconds, plan.calibration.seconds
    if abs(now / seen - 1) > 0.15:
        said.append(
            f"The recorded setting itself is simulated as {_seconds(now)} instead of {_seconds(seen)}: take the rest "
            "as a comparison of settings, not as times."
        )
    if recorded.ranks == 1 and any(found.setting.ranks > 1 for found in plan.splits):
        said.append("What ranks cost each other was not recorded (one rank) and is left out.")
    return said


def show(plan: Plan, console: Console) -> None:
    console.print(_table(f"{plan.devices} devices, the recorded work", plan.splits[:ROWS]))
    if len(plan.splits) > ROWS:
        console.print(f"and {len(plan.splits) - ROWS} slower splits (--json shows all)")
    console.print(_table("other batches (prompts x group size), each on its best split", plan.sizes[:ROWS], sizes=True))
    console.print(
        "synchr.: the same under the synchronous schedule; trained/s: responses of groups that have a gradient; "
        "busy: engines, trainer",
        highlight=False,
    )
    console.print()
    console.print(sentence(plan), soft_wrap=True, highlight=False)
    for text in caveats(plan):
        console.print(text, soft_wrap=True, highlight=False)


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "devices": plan.devices,
        "sentence": sentence(plan),
        "caveats": caveats(plan),
        "recorded": {"seconds": plan.calibration.seconds, "periods": plan.calibration.periods, **_record(plan.now)},
        "costs": asdict(plan.calibration.costs),
        "splits": [_record(found) for found in plan.splits],
        "sizes": [_record(found) for found in plan.sizes],
    }


def _record(found: Prediction) -> dict[str, Any]:
    return {
        "setting": asdict(found.setting),
        "predicted_seconds": found.outcome.seconds,
        "synchronous_seconds": found.synchronous,
        "samples_per_second": found.samples_per_second,
        "bound": found.bound,
        "states": found.outcome.states,
        "engine_share": found.outcome.engine_share,
        "trainer_share": found.outcome.trainer_share,
    }


def _table(title: str, rows: tuple[Prediction, ...], *, sizes: bool = False) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["engines", "ranks", *(["batch"] if sizes else []), "period", "synchr.", "trained/s", "busy"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for found in rows:
        setting, outcome = found.setting, found.outcome
        table.add_row(
            str(setting.engines),
            str(setting.ranks),
            *([f"{setting.prompts} x {setting.group_size}"] if sizes else []),
            _seconds(outcome.seconds),
            _seconds(found.synchronous),
            f"{found.samples_per_second:,.0f}"
            if found.samples_per_second >= 100
            else f"{found.samples_per_second:.3g}",
            f"{outcome.engine_share:.0%} {outcome.trainer_share:.0%}",
            found.bound,
        )
    return table


def _split(setting: Setting) -> str:
    engines = f"{setting.engines} engine{'s' * (setting.engines > 1)}"
    return f"{engines} and {setting.ranks} rank{'s' * (setting.ranks > 1)}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"
