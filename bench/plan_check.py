"""How well `rondo plan` foresees periods that it has not seen: one run to calibrate from, others predicted, then run.

    python bench/plan_check.py [--periods 3] [--json PATH]

The work of bench/overlap.py, a core each for engine and trainer. Every setting differs from the calibrating run in what
its name says. A prediction is the mean of 16 simulated periods; it is held to the median of the periods that were run
after the first. Lengths are drawn from those of the calibrating run, not from those of the run that is predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rondo
from overlap import PINNED, make_work
from rondo.plan.calibrate import Calibration, calibrate, setting_of
from rondo.plan.search import predict

BASE = ["rollout.prompts_per_period=24"]
APART = ["engines.count=2", "engines.cpus=[[0],[1]]", "schedule.mode=synchronous", "engines.slots=16"]
SETTINGS: dict[str, list[str]] = {
    "slots 32 -> 12": ["engines.slots=12"],
    "slots 32 -> 64": ["engines.slots=64"],
    "group size 8 -> 4": ["rollout.group_size=4"],
    "prompts 24 -> 40": ["rollout.prompts_per_period=40"],
    "longest 96 -> 48": ["rollout.max_new_tokens=48"],
    "longest 96 -> 160": ["rollout.max_new_tokens=160"],
    "micro_tokens 2048 -> 512": ["trainer.micro_tokens=512"],
    "synchronous": ["schedule.mode=synchronous"],
    "synchronous, 2 engines x 16 slots": APART,
}
GOAL = 0.15


def run(folder: Path, name: str, settings: list[str], periods: int) -> tuple[rondo.Config, Path]:
    target = folder / name
    changes = [*PINNED, *BASE, *settings, f"schedule.periods={periods + 1}", f"run.folder='{target}'"]
    config = rondo.read_config(folder / "run.toml", changes)
    rondo.train(config)
    return config, target


def measured(target: Path) -> float:
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()][1:]
    return statistics.median(line["seconds"] for line in lines)


def checked(name: str, config: rondo.Config, target: Path, calibration: Calibration) -> dict[str, Any]:
    found = predict(calibration, setting_of(config), draws=16)
    seconds = measured(target)
    return {
        "setting": name,
        "predicted": found.outcome.seconds,
        "measured": seconds,
        "error": found.outcome.seconds / seconds - 1,
        "bound": found.bound,
        "costs": dataclasses.asdict(calibration.costs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_work(folder)
        _, target = run(folder, "calibration", [], arguments.periods + 1)
        calibration = calibrate(target)
        for number, (setting, changes) in enumerate(SETTINGS.items()):
            config, target = run(folder, f"run-{number}", changes, arguments.periods)
            rows.append(checked(setting, config, target, calibration))
    print(f"\n{'setting':<36}{'predicted':>10}{'measured':>10}{'error':>8}  bound by")
    for row in rows:
        times = f"{row['predicted']:>8.2f} s{row['measured']:>8.2f} s{row['error']:>+8.1%}"
        print(f"{row['setting']:<36}{times}  {row['bound']}")
    errors = [abs(row["error"]) for row in rows]
    verdict = "within" if statistics.median(errors) <= GOAL else "NOT within"
    print(f"\nmedian error {statistics.median(errors):.1%} ({verdict} {GOAL:.0%}), largest {max(errors):.1%}, ", end="")
    print(f"{len(rows)} settings, {time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
