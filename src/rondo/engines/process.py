"""Where an engine's process is, and whether it still runs. Imports nothing of ours: vLLM's workers use it too."""

from __future__ import annotations

import json
import os
from pathlib import Path

SUPERVISOR = "RONDO_SUPERVISOR"  # names the process whose end must end this one


def identity(pid: int) -> str:
    """A process's id with its start time, for ids are used again; empty when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid}:{fields[19]}"


def alive(name: str) -> bool:
    """Whether the process that `identity` named so still runs."""
    return identity(int(name.partition(":")[0])) == name


def announce(path: Path, *, url: str, boot: str) -> None:
    """Written aside and renamed: whoever sees the file can read it."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps({"url": url, "pid": os.getpid(), "boot": boot}))
    os.replace(aside, path)


def printable_host(host: str) -> str:
    """An address that a client can use."""
    return "127.0.0.1" if host in ("", "0.0.0.0") else host
