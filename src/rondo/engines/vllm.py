"""How a vLLM server is started so that Rondo can drive it: a command and its environment. Pure but for looking around.

`rondo serve --backend vllm` runs exactly this, and with `--print` shows it: a vLLM that is given by address must have
been started in the same way.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rondo.errors import ConfigError

OLDEST = (0, 24, 0)
TESTED = ((0, 24, 0), (0, 32, 0))
CPU_VERSION = "0.32.0"
GUARD = "rondo.engines.bearer.RequireToken"
WORKER = "rondo.engines.vllm_worker.RondoWorker"
COMPLETIONS = "rondo.engines.vllm_tokens.TokenCompletions"


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """What a user may choose; the rest follows."""

    model: str
    python: str  # an interpreter that has vLLM
    host: str = "127.0.0.1"
    port: int
    dtype: str = "float32"
    slots: int = 64
    max_model_len: int = 0  # 0: what the model allows
    tensor_parallel: int = 1
    memory_share: float = 0.0  # of the accelerator's memory; 0: vLLM's own default
    kv_cache_gib: int = 1  # on CPU
    threads: int = 0  # on CPU; 0: all cores
    arguments: tuple[str, ...] = ()  # further flags, as they are


def command(settings: VllmSettings) -> list[str]:
    line = [settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model]
    line += ["--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype]
    line += ["--max-num-seqs", str(settings.slots), "--tensor-parallel-size", str(settings.tensor_parallel)]
    if settings.max_model_len:
        line += ["--max-model-len", str(settings.max_model_len)]
    if settings.memory_share:
        line += ["--gpu-memory-utilization", str(settings.memory_share)]
    # One distribution: no sampling defaults from the model's folder, log-probs of what is really sampled from.
    line += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    line += ["--enable-prefix-caching", "--worker-extension-cls", WORKER, "--disable-uvicorn-access-log"]
    line += ["--middleware", COMPLETIONS]
    # The last one is asked first: whoever has no token must not get past it to any of the others.
    return [*line, *settings.arguments, "--middleware", GUARD]


def environment(settings: VllmSettings, packages: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """What is set on top of `outer`; `packages` is a folder from which `rondo` can be imported, and nothing else."""
    paths = [str(packages), *filter(None, [outer.get("PYTHONPATH", "")])]
    added = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, prefix reset and calls to our worker extension
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # a connection that it drops just when it is used again fails a request
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
    }
    if settings.threads:
        # vLLM would bind its threads to every core, the trainer's included.
        added |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    if Path(settings.model).is_dir():
        added |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return added


def printable(line: Sequence[str], variables: Mapping[str, str]) -> str:
    """The command as one would type it."""
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*words, *(shlex.quote(word) for word in line)])


def find_python(configured: str) -> str:
    """An interpreter that has vLLM: the configured one, this one, or that of the cached CPU environment."""
    if configured:
        if not Path(configured).is_file():
            raise ConfigError(f"engines.python = {configured}: there is no such file")
        return configured
    found = importlib.util.find_spec("vllm")
    if found is not None and found.submodule_search_locations is not None:  # a package, not some vllm.py on the path
        return sys.executable
    cached = cpu_environment() / "bin" / "python"
    if cached.is_file():
        return str(cached)
    raise ConfigError(
        f"vLLM is not installed here: set engines.python to an interpreter that has vLLM {OLDEST[0]}.{OLDEST[1]} or "
        "newer, or build the environment for CPU as docs/vllm.md says"
    )


def check_python(python: str) -> None:
    """One that has no vLLM is found out before a server is started."""
    if python == sys.executable:
        return
    looked = subprocess.run(
        [python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"],
        capture_output=True,
        check=False,
    )
    if looked.returncode != 0:
        raise ConfigError(f"engines.python = {python} has no vLLM: install it there, or name another interpreter")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rondo"


def cpu_environment() -> Path:
    """Where scripts/vllm_environment.py puts vLLM for CPU."""
    return cache_folder() / f"vllm-cpu-{CPU_VERSION}"


def packages_folder() -> Path:
    """A folder with nothing but a link to this `rondo`: what else lies beside it must not shadow vLLM's packages."""
    package = Path(__file__).resolve().parent.parent
    folder = cache_folder() / "import" / hashlib.sha256(str(package).encode()).hexdigest()[:12]
    link = folder / "rondo"
    if not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"rondo.{os.getpid()}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(package)
        os.replace(aside, link)
    return folder
