"""Folders that must not outlive a process, however it ends."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import IO


def remove_when_we_end(*folders: Path) -> IO[bytes]:
    """A shell that waits until this process is gone, however it went, and then removes the folders; or until what is
    returned is closed. It is no child of ours: what kills a process with all its children must not reach it."""
    script = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$@") >/dev/null 2>&1 &'
    command = ["sh", "-c", script, "sh", *map(str, folders)]
    shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    shell.wait()
    assert shell.stdin is not None
    return shell.stdin
