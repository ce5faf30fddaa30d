"""`rondo` as a person runs it: real processes, their output, and who is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

BASE = """
[run]
seed = 3
[model]
path = "rondo:arithmetic"
[data]
train = "rondo:arithmetic/train.jsonl"
eval = "rondo:arithmetic/eval.jsonl"
[rollout]
prompts_per_period = 8
group_size = 4
max_new_tokens = 6
[schedule]
periods = 3
[trainer]
learning_rate = 1e-4
[engines]
slots = 16
[rewards]
functions = ["rondo.rewards.arithmetic:correct"]
[eval]
prompts = 16
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str
    folder: Path

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def command(folder: Path, *settings: str, options: tuple[str, ...] = (), config: str = BASE) -> list[str]:
    file = folder / "run.toml"
    file.write_text(config)
    sets = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "rondo", "train", str(file), "--run-dir", str(folder / "run"), *sets, *options]


def rondo(folder: Path, *settings: str, options: tuple[str, ...] = (), config: str = BASE) -> Outcome:
    done = subprocess.run(
        command(folder, *settings, options=options, config=config),
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert_nobody_left(folder)
    return Outcome(code=done.returncode, out=done.stdout, err=done.stderr, folder=folder / "run")


def started(folder: Path, *settings: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The same, still running."""
    return subprocess.Popen(
        command(folder, *settings, options=options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def survivors(folder: Path) -> list[str]:
    """Command lines of processes that still mention this run's folder, and files left in shared memory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                here = os.readlink(entry / "cwd")
            except OSError:
                continue
            if str(folder) in line or here == str(folder):
                found.append(line)
    return found


def assert_nobody_left(folder: Path) -> None:
    wait_for(lambda: not survivors(folder), seconds=15)


def status_of(url: str, path: str, token: str = "") -> int:
    """What an endpoint answers to a plain look."""
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
