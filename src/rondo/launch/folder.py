"""A run's folder, made ready before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from rondo.config import Config
from rondo.errors import ConfigError


def prepare(config: Config, *, resume: bool, overwrite: bool) -> Path:
    folder = config.run.path.absolute()
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / "metrics.jsonl").exists() and not resume:
        raise ConfigError(f"{folder} already holds a run: go on with --resume, or choose another --run-dir")
    if resume and not (folder / "config.json").exists():
        raise ConfigError(f"{folder} holds no run to resume: start it without --resume")
    for name in ("logs", "engines"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for stale in [*(folder / "engines").glob("*.*"), folder / "error.json", folder / "rendezvous"]:
        stale.unlink(missing_ok=True)
    config.write(folder / "config.json")
    return folder
