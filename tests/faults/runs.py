"""What the fault tests share: settings under which nothing but a lost sample could change a bit, and their outcome."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.integration.harness import Outcome, assert_nobody_left

# Same seeds, same samples, same bits, whichever engine answers and whenever.
EXACT = (
    "schedule.order=prompt",
    "engines.batch_invariant=true",
    "engines.max_model_len=32",
    "engines.threads=1",
    "trainer.threads=1",
    "schedule.periods=12",
    "rollout.prompts_per_period=16",
    "engines.health_every=0.2",
    "engines.health_seconds=2",
)


def trained(folder: Path) -> list[tuple[object, ...]]:
    """What a run came to, period by period, in bits."""
    lines = [json.loads(line) for line in (folder / "certificate.jsonl").read_text().splitlines()]
    return [(line["period"], line["gradient_hashes"], line["weights_hash"], line["samples"]) for line in lines]


def samples(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()


def periods(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def pids(folder: Path) -> dict[str, int]:
    return {entry["role"]: entry["pid"] for entry in json.loads((folder / "run" / "processes.json").read_text())}


def ended(process: subprocess.Popen[str], folder: Path) -> Outcome:
    out, err = process.communicate(timeout=300)
    assert_nobody_left(folder)
    return Outcome(code=process.returncode, out=out, err=err, folder=folder / "run")
