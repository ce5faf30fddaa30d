"""Where a run's publications lie: a name that follows from the run's folder, so that whoever outlives a crash can
remove it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def publication_folder(configured: str, run_folder: Path) -> Path:
    """As configured, else in shared memory, else in the run's own folder."""
    parent = Path(configured) if configured else SHARED_MEMORY if SHARED_MEMORY.is_dir() else run_folder
    name = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:12]
    return parent / f"rondo-weights-{name}"


def make_publication_folder(path: Path) -> None:
    """Empty, and readable by its owner only."""
    remove_publication_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700)


def remove_publication_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
