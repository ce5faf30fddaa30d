"""Runs that are hurt: who is there, what is left, and how a run is put together again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from rondo.weights.folder import publication_folder
from tests.integration.harness import assert_nobody_left, command, wait_for

# What decides about bits is fixed: a run that was hurt must come out as one that was not.
EXACT = (
    "trainer.accumulation=exact",
    "engines.batch_invariant=true",
    "engines.max_model_len=32",
    "engines.threads=1",
    "eval.prompts=4",
)


@dataclass
class Running:
    """`rondo train` as a child, with all that it says."""

    process: subprocess.Popen[str]
    folder: Path
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._readers = [
            threading.Thread(target=lambda stream=stream: self.said.extend(stream), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def text(self) -> str:
        return "".join(self.said)

    def says(self, words: str, seconds: float = 90.0) -> None:
        wait_for(lambda: words in self.text or self.process.poll() is not None, seconds)
        assert words in self.text, self.text

    def pids(self) -> dict[str, int]:
        """By role, reward workers included."""
        path = self.folder / "processes.json"
        found = {entry["role"]: entry["pid"] for entry in json.loads(path.read_text())}
        for number, pid in enumerate(children(found["trainer-0"], b"rondo.rewards.worker")):
            found[f"reward-{number}"] = pid
        return found

    def ended(self, seconds: float = 120.0) -> int:
        code = self.process.wait(timeout=seconds)
        for reader, stream in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(timeout=10)
            stream.close()
        return code


def start(folder: Path, *settings: str, resume: bool = False) -> Running:
    if not resume or not (folder / "run" / "config.json").exists():
        options: tuple[str, ...] = ()
    else:
        options = ("--resume",)
    (folder / "run" / "processes.json").unlink(missing_ok=True)
    process = subprocess.Popen(
        command(folder, *settings, options=options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    return Running(process, folder / "run")


def children(parent: int, words: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent and words in line:
                found.append(int(entry.name))
    return sorted(found)


def journalled(folder: Path) -> int:
    """Bytes: grows as long as the run gets on."""
    return sum(path.stat().st_size for path in (folder / "journal").glob("*.journal"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def left_over(folder: Path) -> list[str]:
    """Shared memory and temporary files that nobody will need."""
    found = [publication_folder("", folder)]
    found += [*folder.glob(".*.partial"), *folder.glob("*/.*.partial"), *folder.glob("*/*.partial")]
    found += list(Path(tempfile.gettempdir()).glob("rondo-jail-*"))
    return [str(path) for path in found if path.exists()]


def assert_clean(folder: Path) -> None:
    """After a run that ended by itself: no process, no shared memory, no temporary file."""
    assert_nobody_left(folder.parent)
    assert not left_over(folder)


def balanced(folder: Path) -> list[dict[str, int]]:
    """Every period's account of samples; each adds up."""
    found = []
    for line in (folder / "certificate.jsonl").read_text().splitlines():
        told = json.loads(line)["ledger"]
        came, went = told["asked"] + told["reused"], told["trained"] + told["filtered"] + told["unneeded"]
        assert came == went, line
        found.append(told)
    return found


def mounted_tmpfs(path: Path, size: str) -> str:
    """Why a small disk could not be made; empty: it is there."""
    if os.geteuid() != 0 or sys.platform != "linux":
        return "only root can mount a small disk"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    return made.stderr if made.returncode else ""


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
