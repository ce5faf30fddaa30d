"""Runs a program that a model wrote where it can do no harm: no network, no file but its own small folder, no process
but its own, limits on time, memory, files and processes. Linux namespaces and resource limits; see jail.py.

Where the kernel refuses any of it, the program is not run: `SandboxRefused` says why, in one sentence. What is not kept
from the program: reading the system's own folders (/usr, the interpreter), and the system calls of an ordinary process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rondo.errors import RewardError

JAIL = Path(__file__).with_name("jail.py")
REFUSED = 120
GRACE_SECONDS = 5.0
SYSTEM = ("/bin", "/lib", "/lib64", "/usr")


class SandboxRefused(RewardError):  # noqa: N818
    """This machine does not let us lock a program in."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    seconds: float = 5.0  # wall clock, and of the processor
    memory_mb: int = 512  # per process
    processes: int = 32  # threads included
    disk_mb: int = 16  # of the program's own folder
    output_bytes: int = 1 << 20  # kept of what it prints; the file may not outgrow disk_mb


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int  # exit status; 128 and a signal's number where one ended it
    out: str
    err: str
    late: bool  # it was killed at its time limit


def run_python(
    program: str, *, limits: Limits, stdin: str = "", files: Mapping[str, str] | None = None, words: Sequence[str] = ()
) -> Outcome:
    """This program by the interpreter that runs us, without packages; `files` lie beside it in /work."""
    python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    command = [python, "-I", "-B", "program.py", *words]
    return run(command, files={**(files or {}), "program.py": program}, limits=limits, stdin=stdin)


def run(command: Sequence[str], *, files: Mapping[str, str], limits: Limits, stdin: str = "") -> Outcome:
    if sys.platform != "linux":
        raise SandboxRefused("programs that a model wrote run in Linux namespaces only: this system has none")
    if any("/" in name or name in (".", "..") for name in files):
        raise RewardError(f"sandbox files have plain names, without folders: {sorted(files)}")
    root = tempfile.mkdtemp(prefix="rondo-jail-")
    try:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode())
            given.seek(0)
            code, late = _locked(_spec(command, files, limits, root), given, out, err, limits.seconds)
            return Outcome(code=code, late=late, out=_read(out, limits), err=_read(err, limits))
    finally:
        os.rmdir(root)  # what was mounted there was mounted for the jail alone


def refusal() -> str:
    """Why this machine cannot lock programs in; empty: it can."""
    try:
        run_python("", limits=Limits(seconds=20.0))
    except SandboxRefused as refused:
        return str(refused)
    return ""


def _spec(command: Sequence[str], files: Mapping[str, str], limits: Limits, root: str) -> str:
    prefix = os.path.realpath(sys.base_prefix)
    shown = [folder for folder in SYSTEM if os.path.exists(folder)]
    if not prefix.startswith("/usr"):
        shown.append(prefix)
    return json.dumps(
        {
            "command": list(command),
            "environment": {"PATH": "/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8"},
            "files": dict(files),
            "folders": shown,
            "root": root,
            "parent": os.getpid(),
            "disk_bytes": limits.disk_mb << 20,
            "limits": {
                "RLIMIT_AS": limits.memory_mb << 20,
                "RLIMIT_CPU": max(1, round(limits.seconds) + 1),
                "RLIMIT_FSIZE": limits.disk_mb << 20,
                "RLIMIT_NPROC": limits.processes,
                "RLIMIT_NOFILE": 256,
                "RLIMIT_CORE": 0,
            },
        }
    )


def _locked(spec: str, given: IO[bytes], out: IO[bytes], err: IO[bytes], seconds: float) -> tuple[int, bool]:
    """Exit status, and whether it was late."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as told, os.fdopen(reader, "rb") as status:
        told.write(spec.encode())
        told.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(JAIL), str(told.fileno()), str(writer)],
            stdin=given,
            stdout=out,
            stderr=err,
            pass_fds=(told.fileno(), writer),
            start_new_session=True,
        )
        os.close(writer)
        try:
            why = status.read().decode(errors="replace")  # closed when the door is shut behind the program
            began = time.monotonic()
            late = _late(process, began + seconds)
        finally:
            _end(process)
    if process.returncode == REFUSED and why:
        raise SandboxRefused(
            f"programs that a model wrote are not run here: the kernel refuses what locks them in: {why}; allow user "
            "namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0, or a "
            "container with that right)"
        )
    return process.returncode, late


def _late(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first: it ends when all that it locked in have ended."""
    if process.poll() is None:
        process.terminate()
        if _late(process, time.monotonic() + GRACE_SECONDS):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: IO[bytes], limits: Limits) -> str:
    file.seek(0)
    return file.read(limits.output_bytes).decode(errors="replace")
