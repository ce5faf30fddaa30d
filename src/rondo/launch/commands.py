"""What the processes of a run are started with, whoever starts them."""

from __future__ import annotations

import os
from pathlib import Path

from rondo.config import Config, asset_or_path
from rondo.engines.vllm import find_python


def engine_arguments(config: Config, folder: Path, number: int, *, host: str = "", threads: int = 0) -> list[str]:
    """Of `rondo`, for the run's engine with this number; it listens on loopback unless a host is given."""
    engines = config.engines
    threads = threads or engines.threads or share_of_cores(config, config.trainer.ranks)
    arguments = ["serve", "--model", asset_or_path(config.model.path), "--dtype", config.model.dtype]
    arguments += ["--backend", engines.backend, "--slots", str(engines.slots)]
    arguments += ["--port", str(engines.base_port + number if engines.base_port else 0)]
    arguments += ["--threads", str(threads), *(["--host", host] if host else [])]
    arguments += ["--max-model-len", str(engines.max_model_len)]
    arguments += ["--announce", str(folder / "engines" / f"engine-{number}.json")]
    if engines.backend == "vllm":
        arguments += ["--python", find_python(engines.python), "--kv-cache-gib", str(engines.kv_cache_gib)]
        arguments += ["--tensor-parallel", str(engines.tensor_parallel)]
        arguments += ["--memory-share", str(engines.memory_share)]
        return arguments + [f"--argument={word}" for word in engines.arguments]
    arguments += ["--device", engines.device]
    return arguments + (["--batch-invariant"] if engines.batch_invariant else [])


def share_of_cores(config: Config, ranks: int) -> int:
    """Threads for one process when the cores are shared out evenly among the trainer's ranks and the engines."""
    processes = ranks + (0 if config.engines.urls else config.engines.count)
    return max(1, len(os.sched_getaffinity(0)) // processes)
