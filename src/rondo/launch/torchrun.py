"""`torchrun ... -m rondo train FILE`: this process is one of the ranks that torchrun started, on one of its machines.

Every machine has the config file and the model; rank 0's has the data too, and the run's folder. Engines run elsewhere.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rondo.config import Config
from rondo.errors import ConfigError
from rondo.launch.folder import prepare
from rondo.launch.preflight import check, check_model
from rondo.launch.reaper import remove_when_we_end
from rondo.weights.folder import publication_folder


def started_us() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def main(config: Config, *, resume: bool) -> int:
    """The process's exit code."""
    if not config.engines.urls:
        raise ConfigError(
            "under torchrun only trainer ranks are started: start engines with `rondo serve`, and name them in "
            "engines.urls"
        )
    if config.launch.backend != "local":
        raise ConfigError(
            f'launch.backend = "{config.launch.backend}" starts the ranks itself: use `rondo train` without torchrun'
        )
    from rondo.launch.rank import main as rank_main

    if os.environ["RANK"] != "0":
        check_model(config.model.path)
        own = Path(tempfile.mkdtemp(prefix="rondo-rank-"))
        with remove_when_we_end(own):
            return rank_main(config, own, resume=resume, launched=False)
    check(config)
    folder = prepare(config, resume=resume, overwrite=False)
    with remove_when_we_end(*(publication_folder(parent, folder) for parent in {config.weights.folder, ""})):
        return rank_main(config, folder, resume=resume, launched=False)
