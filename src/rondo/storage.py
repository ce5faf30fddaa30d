"""The disk: what was written is really there; and was it the disk? Libraries wrap what the system says, or do not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

FULL = 1 << 16  # bytes free and fewer


def storage_sentence(folder: Path, error: BaseException) -> str:
    """For an error that came of a full or unwritable disk, however deep in a library; empty for any other."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return f"{cause.filename or folder} cannot be written: {cause.strerror}: make room and go on with --resume"
        cause = cause.__cause__ or cause.__context__
    if shutil.disk_usage(folder).free < FULL:
        return f"the disk of {folder} is full: make room and go on with --resume"
    return ""


def sync(path: Path) -> None:
    """A file or folder onto the disk: it survives a loss of power, and other hosts see it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
