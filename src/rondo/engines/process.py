"""Where an engine's process is, and whether it still runs. Imports nothing of ours: vLLM's workers use it too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_SECONDS = 3.0

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


def descendants(pid: int) -> list[int]:
    """All that a process started, and that those did, as far as /proc shows them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        own = children.get(todo.pop(), [])
        found += own
        todo += own
    return found


def members(group: int) -> list[int]:
    """A process group's, as far as /proc shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if fields[0] not in "ZX" and int(fields[2]) == group:
            found.append(int(path.parent.name))
    return found


def end_group(group: int) -> None:
    """Kill all of a process group; whoever of it asks for this is the last.

    Python's resource trackers are spared: they leave by themselves when the others are gone, and remove the shared
    memory that those had no time to.
    """
    own = os.getpid()
    for pid in members(group):
        if pid != own and _TRACKER not in title(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if os.getpgrp() == group:
        os.kill(own, signal.SIGKILL)
    deadline = time.monotonic() + _TRACKER_SECONDS
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def title(pid: int) -> str:
    """A process's command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def announce(path: Path, *, url: str, boot: str) -> None:
    """Written aside and renamed: whoever sees the file can read it."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps({"url": url, "pid": os.getpid(), "boot": boot}))
    os.replace(aside, path)


def printable_host(host: str) -> str:
    """An address that a client can use."""
    return "127.0.0.1" if host in ("", "0.0.0.0") else host
